/* Products with weights that stay as they are stored: y = x w^T, for few rows of x.
 *
 * The weights are 16-bit floats, or packed as `mx.quantize` packs them in its affine mode: codes of
 * 8 or 4 bits, the first one in the lowest bits, and a scale and a bias for each group of 32, 64 or
 * 128 codes. Such a weight is scale * code + bias.
 *
 * Some weight rows at a time are converted to float, a block of columns that fits the L1 cache, and
 * multiplied by all rows of x. So each weight is read from memory and converted once. The sums of
 * one result are added up in the same order however many rows there are: a row of x gets the same
 * bits alone and together with others. One or two rows are multiplied as the weights are converted,
 * without storing them.
 *
 * Included by products.c.
 */
#include <stdlib.h>
#include <string.h>

#if WIDTH == 16 || defined __F16C__
#include <immintrin.h>
#endif
#if defined __x86_64__ && WIDTH < 16
#define TOGETHER 4 /* weight rows that are multiplied at once: their sums stay in registers */
#define MOST_X 2   /* rows of x that are multiplied at once */
#else
#define TOGETHER 8
#define MOST_X 3
#endif
#define COLUMNS 512 /* of a block */
#define ROWS_AT_ONCE 32
#define LEAST_PART_ROWS 64   /* weight rows of a part */
#define PART_NUMBERS 131072  /* weights of a part, about */

typedef uint32_t uvec __attribute__((vector_size(4 * WIDTH)));

typedef enum { FLOAT32, FLOAT16, BFLOAT16, CODES_OF_8, CODES_OF_4 } Format;

typedef struct {
    const uint8_t *weights;      /* [outputs, inputs] in `format` */
    const void *scales, *biases; /* [outputs, inputs / group], of codes */
    int32_t outputs, inputs, group;
    int32_t format, scale_format;
} Packed;

typedef struct {
    const Packed *w;
    float alpha, beta;
    const float *x;              /* [rows, inputs] */
    float *y;                    /* products: [rows, end - first]; weights: [end - first, inputs] */
    int64_t x_stride, y_stride;  /* from row to row */
    int rows, first, end, part_rows;
    const struct Integers *integers; /* x, if the products are computed in integers */
} PackedCall;

/* A weight row's bytes; of 16 bits, 2 per number, and so on. format: a constant. */
INLINE int64_t bytes_of(Format format, int64_t numbers) {
    return format == CODES_OF_4 ? numbers / 2 : format == CODES_OF_8 ? numbers : 2 * numbers;
}

INLINE float half_as_float(uint16_t half) {
#if defined __F16C__
    return _cvtsh_ss(half);
#elif defined __aarch64__
    __fp16 number;
    memcpy(&number, &half, sizeof(number));
    return number;
#else
    union { uint32_t bits; float number; } u = {(uint32_t)(half & 0x7fff) << 13};
    if ((half & 0x7c00) == 0x7c00) u.bits |= 0x7f800000; /* infinite, or not a number */
    else u.number *= 0x1p112f;
    u.bits |= (uint32_t)(half & 0x8000) << 16;
    return u.number;
#endif
}

/* Converts `count` numbers of `from`, from number `at` on, to float. */
static void widen(const void *from, Format format, int64_t at, int count, float *restrict to) {
    const uint16_t *halves = (const uint16_t *)from + at;
    if (format == FLOAT16) {
        int i = 0;
#if defined __F16C__
        for (; i + 8 <= count; i += 8) {
            _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(halves + i))));
        }
#endif
        for (; i < count; i++) to[i] = half_as_float(halves[i]);
    } else if (format == BFLOAT16) {
        uint32_t *bits = (uint32_t *)to;
        for (int i = 0; i < count; i++) bits[i] = (uint32_t)halves[i] << 16;
    } else {
        memcpy(to, (const float *)from + at, sizeof(float) * count);
    }
}

/* How the codes of a group become weights. */
typedef struct {
    vec scale, bias;
#if WIDTH == 16
    vec table; /* the weight of each code of 4 bits */
#endif
} Group;

/* Group number `g` of a row; a group of zeros if the format has no codes. format: a constant. */
INLINE Group group_at(Format format, const float *scales, const float *biases, int g) {
    Group group = {};
    if (format < CODES_OF_8) return group;
    group.scale = (vec){} + scales[g];
    group.bias = (vec){} + biases[g];
#if WIDTH == 16
    const vec numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    group.table = numbers * group.scale + group.bias;
#endif
    return group;
}

/* WIDTH weights, in the order of `mixed` for 4 bits. format: a constant. */
INLINE vec weights_at(const uint8_t *at, Format format, const Group *group) {
    ivec code;
#if WIDTH == 16
    if (format == CODES_OF_4) {
        const __m512i shift =
            _mm512_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 28, 28);
        int64_t both;
        memcpy(&both, at, 8);
        __m512i codes = _mm512_srlv_epi32(_mm512_set1_epi64(both), shift);
        /* this looks only at the lowest 4 bits of each index */
        return (vec)_mm512_permutexvar_ps(codes, (__m512)group->table);
    }
    if (format == FLOAT16) return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
    if (format == BFLOAT16) {
        __m512i halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at));
        return (vec)_mm512_slli_epi32(halves, 16);
    }
    code = (ivec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at));
#else
    if (format == CODES_OF_4) {
        uint32_t word = 0;
        uvec shift;
        memcpy(&word, at, WIDTH / 2);
        for (int i = 0; i < WIDTH; i++) shift[i] = 4 * i;
        code = (ivec)(((uvec){} + word) >> shift & 15);
    } else if (format == CODES_OF_8) {
        for (int i = 0; i < WIDTH; i++) code[i] = at[i];
    } else {
#if WIDTH == 8 && defined __F16C__
        if (format == FLOAT16) return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
#endif
        uint16_t halves[WIDTH];
        memcpy(halves, at, sizeof(halves));
        if (format == BFLOAT16) {
            uvec bits;
            for (int i = 0; i < WIDTH; i++) bits[i] = halves[i];
            return (vec)(bits << 16);
        }
        vec result;
        for (int i = 0; i < WIDTH; i++) result[i] = half_as_float(halves[i]);
        return result;
    }
#endif
    return __builtin_convertvector(code, vec) * group->scale + group->bias;
}

/* Converts `columns` weights of a row to float, for 4 bits in the order of `mixed`. group: weights that
 * share a scale. scales, biases: of the first group. format: a constant. */
INLINE void convert(const uint8_t *from, Format format, int group, int columns,
                    const float *scales, const float *biases, float *to) {
    for (int at = 0, g = 0; at < columns; g++) {
        Group own = group_at(format, scales, biases, g);
        int end = at + group < columns ? at + group : columns;
        for (; at < end; at += 2 * WIDTH, to += 2 * WIDTH) {
            store(to, weights_at(from, format, &own));
            store(to + WIDTH, weights_at(from + bytes_of(format, WIDTH), format, &own));
            from += bytes_of(format, 2 * WIDTH);
        }
    }
}

#if WIDTH == 16
#define MIXES 1
/* The order 0, 8, 1, 9, 2, 10, …: that of codes of 4 bits if each pair of lanes has both words. */
INLINE vec mixed(vec v) {
    const __m512i order = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    return (vec)_mm512_permutexvar_ps(order, (__m512)v);
}

/* Undoes `mixed`. */
INLINE vec unmixed(vec v) {
    const __m512i order = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    return (vec)_mm512_permutexvar_ps(order, (__m512)v);
}
#else
#define MIXES 0
INLINE vec mixed(vec v) { return v; }
INLINE vec unmixed(vec v) { return v; }
#endif

/* sums[r, i] += weight row r . x row i over a block of columns. tile: [TOGETHER, COLUMNS]; sums:
 * [TOGETHER, rows]. x_rows: a constant. */
INLINE void multiply(const float *tile, int columns, const float *x, int64_t stride, int x_rows,
                     vec *sums, int rows) {
    vec own[TOGETHER][MOST_X];
#pragma GCC unroll 8
    for (int r = 0; r < TOGETHER; r++) {
#pragma GCC unroll 3
        for (int i = 0; i < x_rows; i++) own[r][i] = sums[r * rows + i];
    }
    for (int at = 0; at < columns; at += WIDTH) {
        vec of_x[MOST_X];
#pragma GCC unroll 3
        for (int i = 0; i < x_rows; i++) of_x[i] = load(x + i * stride + at);
#pragma GCC unroll 8
        for (int r = 0; r < TOGETHER; r++) {
            vec weights = load(tile + r * COLUMNS + at);
#pragma GCC unroll 3
            for (int i = 0; i < x_rows; i++) own[r][i] += weights * of_x[i];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < TOGETHER; r++) {
#pragma GCC unroll 3
        for (int i = 0; i < x_rows; i++) sums[r * rows + i] = own[r][i];
    }
}

/* A block of columns of TOGETHER weight rows. */
typedef struct {
    const uint8_t *weights; /* of the first row; those of the next row are `row_bytes` further */
    int64_t row_bytes;
    int group, columns;
    int groups; /* scales and biases from one row to the next */
    const float *scales, *biases;
} Columns;

/* As `convert` and `multiply`, but weights are multiplied as they are converted. sums: [TOGETHER,
 * x_rows]. format, x_rows: constants. */
INLINE void multiply_packed(const Columns *of, Format format, const float *x, int64_t stride,
                            int x_rows, vec *sums) {
    const uint8_t *weights = of->weights;
    int64_t row_bytes = of->row_bytes;
    int group_size = of->group, columns = of->columns, groups = of->groups;
    vec own[TOGETHER][2];
#pragma GCC unroll 8
    for (int r = 0; r < TOGETHER; r++) {
#pragma GCC unroll 2
        for (int i = 0; i < x_rows; i++) own[r][i] = sums[r * x_rows + i];
    }
    for (int at = 0, g = 0; at < columns; g++) {
        Group group[TOGETHER];
#pragma GCC unroll 8
        for (int r = 0; r < TOGETHER; r++) {
            group[r] = group_at(format, of->scales + r * groups, of->biases + r * groups, g);
        }
        int end = at + group_size < columns ? at + group_size : columns;
        for (; at < end; at += WIDTH, weights += bytes_of(format, WIDTH)) {
            vec of_x[2];
#pragma GCC unroll 2
            for (int i = 0; i < x_rows; i++) of_x[i] = load(x + i * stride + at);
#pragma GCC unroll 8
            for (int r = 0; r < TOGETHER; r++) {
                vec converted = weights_at(weights + r * row_bytes, format, &group[r]);
                __builtin_prefetch(weights + (TOGETHER + r) * row_bytes);
#pragma GCC unroll 2
                for (int i = 0; i < x_rows; i++) own[r][i] += converted * of_x[i];
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < TOGETHER; r++) {
#pragma GCC unroll 2
        for (int i = 0; i < x_rows; i++) sums[r * x_rows + i] = own[r][i];
    }
}

INLINE int groups_of(const Packed *w, Format format) {
    return format < CODES_OF_8 ? 0 : w->inputs / w->group;
}

/* The products of `count` <= TOGETHER weight rows, from `first`, with up to ROWS_AT_ONCE rows of x.
 * format: a constant. */
INLINE void multiply_rows(const PackedCall *call, Format format, int first, int count, int row,
                          int rows, const float *scales, const float *biases) {
    const Packed *w = call->w;
    const float *x = call->x + row * call->x_stride;
    int groups = groups_of(w, format), group_size = groups ? w->group : COLUMNS;
    int64_t row_bytes = bytes_of(format, w->inputs);
    float tile[TOGETHER * COLUMNS] __attribute__((aligned(64)));
    vec sums[TOGETHER * rows];
    memset(sums, 0, sizeof(sums));
    if (count < TOGETHER) memset(tile, 0, sizeof(tile));
    for (int at = 0; at < w->inputs; at += COLUMNS) {
        int columns = w->inputs - at < COLUMNS ? w->inputs - at : COLUMNS, g = at / group_size;
        if (!groups) g = 0;
        const uint8_t *weights = w->weights + first * row_bytes + bytes_of(format, at);
        if (rows <= 2 && count == TOGETHER) { /* the tile would cost more than it saves */
            Columns of = {weights, row_bytes, group_size, columns, groups, scales + g, biases + g};
            if (rows == 1) multiply_packed(&of, format, x + at, 0, 1, sums);
            else multiply_packed(&of, format, x + at, call->x_stride, 2, sums);
            continue;
        }
        for (int r = 0; r < count; r++) {
            convert(weights + r * row_bytes, format, group_size, columns, scales + r * groups + g,
                    biases + r * groups + g, tile + r * COLUMNS);
        }
        for (int done = 0; done < rows;) {
            int left = rows - done;
            const float *from = x + done * call->x_stride + at;
#if MOST_X == 3
            if (left == 3 || left > 4) {
                multiply(tile, columns, from, call->x_stride, 3, sums + done, rows);
                done += 3;
                continue;
            }
#endif
            if (left > 1) {
                multiply(tile, columns, from, call->x_stride, 2, sums + done, rows);
                done += 2;
            } else {
                multiply(tile, columns, from, call->x_stride, 1, sums + done, rows);
                done += 1;
            }
        }
    }
    for (int done = 0; done < rows; done++) {
        float *y = call->y + (row + done) * call->y_stride + first - call->first;
        for (int r = 0; r < count; r++) {
            float product = call->alpha * sum(sums[r * rows + done]);
            y[r] = call->beta ? product + call->beta * y[r] : product;
        }
    }
}

/* The weight rows of a part, [*start, the result). */
INLINE int end_of_part(const PackedCall *call, int part, int *start) {
    *start = call->first + part * call->part_rows;
    return *start + call->part_rows < call->end ? *start + call->part_rows : call->end;
}

/* Multiplies all rows of x by the weight rows of a part. format: a constant. */
INLINE void multiply_part(const PackedCall *call, Format format, int part) {
    const Packed *w = call->w;
    int start, end = end_of_part(call, part, &start), groups = groups_of(w, format);
    float scales[TOGETHER * groups + 1], biases[TOGETHER * groups + 1];
    for (int first = start; first < end; first += TOGETHER) {
        int count = end - first < TOGETHER ? end - first : TOGETHER;
        widen(w->scales, w->scale_format, (int64_t)first * groups, count * groups, scales);
        widen(w->biases, w->scale_format, (int64_t)first * groups, count * groups, biases);
        for (int row = 0; row < call->rows; row += ROWS_AT_ONCE) {
            int rows = call->rows - row < ROWS_AT_ONCE ? call->rows - row : ROWS_AT_ONCE;
            multiply_rows(call, format, first, count, row, rows, scales, biases);
        }
    }
}

/* Converts the weight rows of a part to float. format: a constant. */
INLINE void convert_part(const PackedCall *call, Format format, int part) {
    const Packed *w = call->w;
    int start, end = end_of_part(call, part, &start), groups = groups_of(w, format);
    float scales[groups + 1], biases[groups + 1];
    for (int row = start; row < end; row++) {
        float *to = call->y + (int64_t)(row - call->first) * w->inputs;
        widen(w->scales, w->scale_format, (int64_t)row * groups, groups, scales);
        widen(w->biases, w->scale_format, (int64_t)row * groups, groups, biases);
        convert(w->weights + row * bytes_of(format, w->inputs), format,
                groups ? w->group : w->inputs, w->inputs, scales, biases, to);
        if (!MIXES || format != CODES_OF_4) continue;
        for (int at = 0; at < w->inputs; at += WIDTH) store(to + at, unmixed(load(to + at)));
    }
}

/* Calls a function with the format of the weights as a constant. */
#define FOR_FORMAT(function)                                                                      \
    const PackedCall *call = work;                                                                \
    switch (call->w->format) {                                                                    \
    case FLOAT16: function(call, FLOAT16, part); break;                                           \
    case BFLOAT16: function(call, BFLOAT16, part); break;                                         \
    case CODES_OF_8: function(call, CODES_OF_8, part); break;                                     \
    case CODES_OF_4: function(call, CODES_OF_4, part); break;                                     \
    }

static void part_of_packed_product(void *work, int part) { FOR_FORMAT(multiply_part) }

static void part_of_conversion(void *work, int part) { FOR_FORMAT(convert_part) }

/* Runs `run` on parts of the weight rows, of about PART_NUMBERS multiplications each. */
static void share_out_rows(PackedCall *call, Part *run, int threads) {
    int64_t of_numbers = PART_NUMBERS / ((int64_t)call->w->inputs * (call->rows ? call->rows : 1));
    int part_rows = of_numbers > LEAST_PART_ROWS ? (int)of_numbers : LEAST_PART_ROWS;
    call->part_rows = (part_rows + TOGETHER - 1) / TOGETHER * TOGETHER;
    int parts = (call->end - call->first + call->part_rows - 1) / call->part_rows;
    share_out(run, call, parts, threads);
}

#if WIDTH == 16 && defined __AVX512VNNI__ && defined __AVX512BW__
#define HAS_INTEGER_PRODUCTS 1
#define UNIT 64 /* codes of a register */
#define PLANES 3
#define LEVELS 2080768.0f /* 127 * 128 * 128: x becomes integers from -LEVELS to LEVELS */
#define SMALLEST 1e-30f /* groups of x below this count as zero */

/* Rows of x as integers of 22 bits, nearly the precision of a float32, with one scale per group. An
 * integer is the sum of its digits * 128^2, 128 and 1, each of 8 bits. The sums of 4 products with
 * codes are exact integers of 32 bits, and for one digit 64 products are one instruction. */
typedef struct Integers {
    int8_t *digits; /* [rows, units, PLANES, UNIT]; codes of 4 bits: even places of a unit first */
    /* [blocks of 4 rows, groups, 4]: the scale of a row's group, and the sum of its numbers */
    float *scales, *sums;
} Integers;

/* The bytes at even places, then those at odd ones. */
static inline __m512i evens_first(__m512i v) {
    __m256i even = _mm512_cvtepi16_epi8(v), odd = _mm512_cvtepi16_epi8(_mm512_srli_epi16(v, 8));
    return _mm512_inserti64x4(_mm512_castsi256_si512(even), odd, 1);
}

/* Converts a group of a row of x to integers. digits: [units, PLANES, UNIT]; is_mixed: even places of a
 * unit first. scale: what the integers are multiplied by; NaN if a number is not finite. total: the sum of
 * the numbers. */
static void group_to_integers(const float *x, int group, int is_mixed, int8_t *digits, float *scale,
                              float *total) {
    __m512 most = _mm512_setzero_ps(), check = most;
    for (int at = 0; at < group; at += 16) {
        __m512 v = _mm512_loadu_ps(x + at);
        most = _mm512_max_ps(most, _mm512_abs_ps(v));
        check = _mm512_fmadd_ps(v, _mm512_setzero_ps(), check); /* NaN if v is not finite */
    }
    float largest = _mm512_reduce_max_ps(most), zero_or_nan = _mm512_reduce_add_ps(check);
    float factor = largest > SMALLEST ? LEVELS / largest : 0;
    int64_t sum = 0;
    for (int at = 0; at < group; at += UNIT) {
        int8_t unit[PLANES][UNIT];
        for (int i = 0; i < UNIT; i += 16) {
            __m512 v = _mm512_mul_ps(_mm512_loadu_ps(x + at + i), _mm512_set1_ps(factor));
            __m512i number = _mm512_cvtps_epi32(v);
            sum += _mm512_reduce_add_epi32(number);
            for (int plane = PLANES - 1; plane >= 0; plane--) {
                __m512i plus_half = _mm512_add_epi32(number, _mm512_set1_epi32(64));
                __m512i rest = _mm512_srai_epi32(plus_half, 7);
                __m512i digit = _mm512_sub_epi32(number, _mm512_slli_epi32(rest, 7));
                _mm_storeu_si128((__m128i *)(unit[plane] + i),
                                 _mm512_cvtepi32_epi8(plane ? digit : number));
                number = rest;
            }
        }
        for (int plane = 0; plane < PLANES; plane++) {
            __m512i v = _mm512_loadu_si512(unit[plane]);
            int8_t *to = digits + PLANES * at + plane * UNIT;
            _mm512_storeu_si512(to, is_mixed ? evens_first(v) : v);
        }
    }
    *scale = (factor ? largest / LEVELS : 0) + zero_or_nan;
    *total = *scale * (float)sum;
}

/* 16 scales or biases of a weight row as float; zeros if there are fewer. */
INLINE __m512 widened(const void *from, Format format, int64_t at, int count) {
    __mmask16 mask = count < 16 ? (__mmask16)((1u << count) - 1) : (__mmask16)0xffff;
    if (format == FLOAT32) return _mm512_maskz_loadu_ps(mask, (const float *)from + at);
    const uint16_t *halves = (const uint16_t *)from + at;
    __m256i bits = _mm512_castsi512_si256(_mm512_maskz_loadu_epi16(mask, halves));
    if (format == FLOAT16) return _mm512_cvtph_ps(bits);
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
}

/* Scales or biases of 4 weight rows as float: to, [groups rounded up to 16, 4]. */
INLINE void widen_four(const void *from, Format format, const int64_t *rows, int groups,
                       float *to) {
    for (int g = 0; g < groups; g += 16, to += 64) {
        __m512 row[4];
        UNROLL for (int i = 0; i < 4; i++) row[i] = widened(from, format, rows[i] + g, groups - g);
        __m512d low = (__m512d)_mm512_unpacklo_ps(row[0], row[1]);
        __m512d low2 = (__m512d)_mm512_unpacklo_ps(row[2], row[3]);
        __m512d high = (__m512d)_mm512_unpackhi_ps(row[0], row[1]);
        __m512d high2 = (__m512d)_mm512_unpackhi_ps(row[2], row[3]);
        /* part i has the groups i, i + 4, i + 8 and i + 12 */
        __m512 part[4] = {(__m512)_mm512_unpacklo_pd(low, low2),
                          (__m512)_mm512_unpackhi_pd(low, low2),
                          (__m512)_mm512_unpacklo_pd(high, high2),
                          (__m512)_mm512_unpackhi_pd(high, high2)};
        UNROLL for (int i = 0; i < 4; i++) {
            _mm_storeu_ps(to + 4 * i, _mm512_extractf32x4_ps(part[i], 0));
            _mm_storeu_ps(to + 4 * i + 16, _mm512_extractf32x4_ps(part[i], 1));
            _mm_storeu_ps(to + 4 * i + 32, _mm512_extractf32x4_ps(part[i], 2));
            _mm_storeu_ps(to + 4 * i + 48, _mm512_extractf32x4_ps(part[i], 3));
        }
    }
}

/* UNIT codes as bytes; of 4 bits, those at even places first. format: a constant. */
INLINE __m512i unit_of_codes(const uint8_t *at, Format format) {
    if (format == CODES_OF_8) return _mm512_loadu_si512(at);
    __m256i codes = _mm256_loadu_si256((const __m256i *)at);
    __m256i high = _mm256_srli_epi16(codes, 4);
    __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(codes), high, 1);
    return _mm512_and_si512(both, _mm512_set1_epi8(15));
}

/* The products of 4 weight rows with `rows` rows of x from `row`, [4, 4]. codes: of each weight
 * row. scales, biases: [groups, 4]. format, rows: constants. */
INLINE void multiply_integers(const PackedCall *call, Format format, const uint8_t *const *codes,
                              int row, const int rows, const float *scales, const float *biases,
                              float *products) {
    const Packed *w = call->w;
    const Integers *x = call->integers;
    int groups = w->inputs / w->group, units = w->group / UNIT;
    const __m512i each_four_times =
        _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    int64_t block = (int64_t)(row / 4) * groups * 4 + row % 4;
    int64_t x_bytes = (int64_t)w->inputs * PLANES;
    const float *x_scales = x->scales + block, *x_sums = x->sums + block;
    const int8_t *digits = x->digits + row * x_bytes;
    __m512 offset = _mm512_setzero_ps();
    vec total[4][4] = {};
    for (int g = 0, at = 0; g < groups; g++) {
        float both[16] __attribute__((aligned(64)));
        __m512 of_w = _mm512_permutexvar_ps(
            each_four_times, _mm512_castps128_ps512(_mm_loadu_ps(scales + 4 * g)));
        __m512 bias = _mm512_permutexvar_ps(
            each_four_times, _mm512_castps128_ps512(_mm_loadu_ps(biases + 4 * g)));
        __m512 of_x = _mm512_broadcast_f32x4(_mm_loadu_ps(x_scales + 4 * g));
        __m512 sums = _mm512_broadcast_f32x4(_mm_loadu_ps(x_sums + 4 * g));
        _mm512_store_ps(both, _mm512_mul_ps(of_w, of_x));
        offset = _mm512_fmadd_ps(bias, sums, offset);
        for (int u = 0; u < units; u++, at += bytes_of(format, UNIT), digits += PLANES * UNIT) {
            __m512i unit[4];
            UNROLL for (int c = 0; c < 4; c++) {
                unit[c] = unit_of_codes(codes[c] + at, format);
                __builtin_prefetch(codes[c] + at + 4 * bytes_of(format, w->inputs));
            }
            UNROLL for (int r = 0; r < rows; r++) {
                UNROLL for (int c = 0; c < 4; c++) {
                    __m512i sum = _mm512_setzero_si512();
                    UNROLL for (int plane = 0; plane < PLANES; plane++) {
                        const int8_t *digit = digits + r * x_bytes + plane * UNIT;
                        sum = _mm512_slli_epi32(sum, plane ? 7 : 0);
                        sum = _mm512_dpbusd_epi32(sum, unit[c], _mm512_loadu_si512(digit));
                    }
                    total[c][r] += (vec)_mm512_cvtepi32_ps(sum) * both[4 * c + r];
                }
            }
        }
    }
    _mm512_storeu_ps(products, offset);
    UNROLL for (int c = 0; c < 4; c++) {
        UNROLL for (int r = 0; r < rows; r++) products[4 * c + r] += sum(total[c][r]);
    }
}

/* As `multiply_part`, in integers: 4 weight rows and up to 4 rows of x at a time. */
INLINE void multiply_part_in_integers(const PackedCall *call, Format format, int part) {
    const Packed *w = call->w;
    int start, end = end_of_part(call, part, &start), groups = groups_of(w, format);
    int padded = (groups + 15) / 16 * 16;
    float scales[4 * padded], biases[4 * padded];
    for (int first = start; first < end; first += 4) {
        const uint8_t *codes[4];
        int64_t places[4];
        int count = end - first < 4 ? end - first : 4;
        for (int c = 0; c < 4; c++) { /* the last row stands for those that are missing */
            int64_t from = first + (c < count ? c : count - 1);
            codes[c] = w->weights + from * bytes_of(format, w->inputs);
            places[c] = from * groups;
        }
        widen_four(w->scales, w->scale_format, places, groups, scales);
        widen_four(w->biases, w->scale_format, places, groups, biases);
        for (int row = 0, rows; row < call->rows; row += rows) {
            float products[16];
            int left = call->rows - row;
            rows = left >= 4 ? 4 : left >= 2 ? 2 : 1;
            switch (rows) {
            case 4: multiply_integers(call, format, codes, row, 4, scales, biases, products); break;
            case 2: multiply_integers(call, format, codes, row, 2, scales, biases, products); break;
            default: multiply_integers(call, format, codes, row, 1, scales, biases, products);
            }
            for (int r = 0; r < rows; r++) {
                float *y = call->y + (row + r) * call->y_stride + first - call->first;
                for (int c = 0; c < count; c++) {
                    float product = call->alpha * products[4 * c + r];
                    y[c] = call->beta ? product + call->beta * y[c] : product;
                }
            }
        }
    }
}

/* work: a PackedCall. */
static void part_in_integers(void *work, int part) {
    const PackedCall *call = work;
    if (call->w->format == CODES_OF_4) multiply_part_in_integers(call, CODES_OF_4, part);
    else multiply_part_in_integers(call, CODES_OF_8, part);
}

/* As `packed_product`, for codes in groups of at least UNIT. */
static int integer_product(PackedCall *call, int threads) {
    const Packed *w = call->w;
    int groups = w->inputs / w->group;
    int64_t blocks = (call->rows + 3) / 4, of_groups = blocks * groups * 4 + 4;
    int64_t digits = (int64_t)call->rows * w->inputs * PLANES;
    char *memory = calloc(1, 2 * of_groups * sizeof(float) + digits);
    if (!memory) return 0;
    Integers x = {.scales = (float *)memory};
    x.sums = x.scales + of_groups;
    x.digits = (int8_t *)(x.sums + of_groups);
    for (int64_t row = 0; row < call->rows; row++) {
        for (int64_t g = 0; g < groups; g++) {
            int64_t place = (row / 4 * groups + g) * 4 + row % 4;
            group_to_integers(call->x + row * call->x_stride + g * w->group, w->group,
                              w->format == CODES_OF_4,
                              x.digits + (row * w->inputs + g * w->group) * PLANES,
                              x.scales + place, x.sums + place);
        }
    }
    call->integers = &x;
    share_out_rows(call, part_in_integers, threads);
    free(memory);
    return 1;
}
#else
#define HAS_INTEGER_PRODUCTS 0
#define UNIT 64
static int integer_product(PackedCall *call, int threads) {
    (void)call, (void)threads;
    return 0;
}
#endif

/* Measured: on an Intel Xeon (Ice Lake), integers are faster; on an AMD EPYC (Zen 5), they take as
 * long as floats for one row, and 1.3 times as long for 16. */
static int integers_pay(void) {
#if HAS_INTEGER_PRODUCTS
    return __builtin_cpu_is("intel") != 0;
#else
    return 0;
#endif
}

/* y = alpha x w^T + beta y, for the weight rows from `call->first` to `call->end`. Returns 0 if
 * memory is short. */
static int packed_product(PackedCall *call, int threads) {
    if (integers_pay() && call->w->format >= CODES_OF_8 && call->w->group >= UNIT) {
        return integer_product(call, threads);
    }
    int inputs = call->w->inputs;
    float *mixed_x = NULL;
    if (MIXES && call->w->format == CODES_OF_4) {
        mixed_x = malloc(sizeof(float) * call->rows * inputs);
        if (!mixed_x) return 0;
        for (int64_t row = 0; row < call->rows; row++) {
            const float *from = call->x + row * call->x_stride;
            float *to = mixed_x + row * inputs;
            for (int at = 0; at < inputs; at += WIDTH) store(to + at, mixed(load(from + at)));
        }
        call->x = mixed_x;
        call->x_stride = inputs;
    }
    share_out_rows(call, part_of_packed_product, threads);
    free(mixed_x);
    return 1;
}

/* Converts the weight rows from `first` to `end` to float: to, [end - first, inputs]. */
static void convert_packed(const Packed *w, int first, int end, float *to) {
    PackedCall call = {.w = w, .y = to, .first = first, .end = end, .part_rows = end - first};
    part_of_conversion(&call, 0);
}
