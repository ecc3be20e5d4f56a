/* Vectors of WIDTH floats, with the vector extensions of GCC and Clang. */
#include <stdint.h>

typedef float vec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * WIDTH)));
typedef float four __attribute__((vector_size(16)));

static inline vec load(const float *at) { return *(const vec *)at; }

static inline void store(float *at, vec value) { *(vec *)at = value; }

static inline vec splat(float value) { return (vec){} + value; }

static inline float sum(vec v) {
    union { vec whole; four parts[WIDTH / 4]; } u = {v};
#if WIDTH == 16
    four total = (u.parts[0] + u.parts[2]) + (u.parts[1] + u.parts[3]);
#elif WIDTH == 8
    four total = u.parts[0] + u.parts[1];
#else
    four total = u.parts[0];
#endif
    return (total[0] + total[2]) + (total[1] + total[3]);
}

static inline vec choose(ivec mask, vec yes, vec no) {
    return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask));
}

static inline vec larger(vec a, vec b) { return choose(a > b, a, b); }

/* exp(x) for x <= 0, with a relative error below 3e-7. */
static inline vec exponential(vec x) {
    x = larger(x, splat(-87.0f));
    vec y = x * 1.44269504f;
    vec n = (y + 12582912.0f) - 12582912.0f; /* rounds to the nearest integer */
    vec f = y - n;
    vec p = splat(1.5469124e-4f);
    p = p * f + 1.3400427e-3f;
    p = p * f + 9.6180400e-3f;
    p = p * f + 5.5503324e-2f;
    p = p * f + 2.4022648e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    ivec bits = (__builtin_convertvector(n, ivec) + 127) << 23;
    return p * (vec)bits;
}
