/* The matrix products of MLX: a front for a BLAS, and products of few rows.
 *
 * MLX calls cblas_sgemm, cblas_dgemm and cblas_cgemm. If this library is loaded before MLX, it gets
 * these calls and passes them on to the BLAS given to `holdfast_use_blas`, whose functions may have
 * other names and take 64-bit integers, as those of the OpenBLAS in numpy's wheel.
 *
 * A BLAS copies both matrices into a packed form before it multiplies them. For the few rows of a
 * decode step, copying the weights takes longer than the product itself. So linear layers of few
 * rows, y = x w^T with w in the form [outputs, inputs], are computed here, and each weight is read
 * once for all rows. Each number of the result is added up in the same order whatever the number
 * of rows, so a row has the same result alone and among others.
 *
 * Plain C with the vector extensions of GCC and Clang.
 */
#include "threads.h"

#if defined __AVX512F__
#define WIDTH 16 /* floats in a vector register */
#define TILE_ROWS 4
#define TILE_COLUMNS 6 /* results of a row that are computed at once; twice as many of one row */
#define MOST_ROWS 32   /* with more, a BLAS is faster */
#elif defined __AVX__
#define WIDTH 8
#define TILE_ROWS 3 /* there are 16 registers, not 32 */
#define TILE_COLUMNS 4
#define MOST_ROWS 16
#else
#define WIDTH 4
#define TILE_ROWS 4
#define TILE_COLUMNS 6
#define MOST_ROWS 16
#endif
#define PART_BYTES 131072 /* weights that a thread reads at a time, half of what is worth waking it */
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16") /* tiles must stay in registers */

typedef float vec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef float four __attribute__((vector_size(16)));

enum { ROW_MAJOR = 101, AS_IT_IS = 111, TRANSPOSED = 112 }; /* of CBLAS */

/* The type of a function of CBLAS; the sizes and strides are of type `integer`. */
#define GEMM(name, integer, scale, number)                                                        \
    void name(int, int, int, integer, integer, integer, scale, const number *, integer,           \
              const number *, integer, scale, number *, integer)
typedef GEMM(Sgemm, int, float, float);
typedef GEMM(Sgemm64, int64_t, float, float);
typedef GEMM(Dgemm, int, double, double);
typedef GEMM(Dgemm64, int64_t, double, double);
typedef GEMM(Cgemm, int, const void *, void);
typedef GEMM(Cgemm64, int64_t, const void *, void);

static struct {
    void *sgemm, *dgemm, *cgemm;
    int takes_64_bits, threads, most_rows;
} blas;

/* y = alpha x w^T + beta y. The strides are those from row to row. */
typedef struct {
    int rows, columns, inner;
    float alpha, beta;
    const float *x, *w;
    float *y;
    int64_t x_stride, w_stride, y_stride;
    int columns_per_part;
} Product;

INLINE vec load(const float *at) { return *(const vec *)at; }

INLINE float sum(vec v) {
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

/* The product of the last numbers of a row, which do not fill a vector. */
static __attribute__((noinline)) float rest_of_product(const float *x, const float *w, int count) {
    float product = 0;
    for (int at = 0; at < count; at++) product += x[at] * w[at];
    return product;
}

INLINE float scaled(const Product *p, float product, const float *y) {
    return p->beta ? p->alpha * product + p->beta * *y : p->alpha * product;
}

INLINE void tile(const Product *p, int row, int column, const int rows, const int columns) {
    const float *x = p->x + row * p->x_stride, *w = p->w + column * p->w_stride;
    vec total[2 * TILE_COLUMNS][TILE_ROWS] = {};
    int rest = p->inner % WIDTH, vectors_end = p->inner - rest;
    for (int at = 0; at < vectors_end; at += WIDTH) {
        vec inputs[TILE_ROWS];
        UNROLL for (int r = 0; r < rows; r++) inputs[r] = load(x + r * p->x_stride + at);
        UNROLL for (int c = 0; c < columns; c++) {
            vec weights = load(w + c * p->w_stride + at);
            UNROLL for (int r = 0; r < rows; r++) total[c][r] += weights * inputs[r];
        }
    }
    UNROLL for (int r = 0; r < rows; r++) {
        float *y = p->y + (row + r) * p->y_stride + column;
        UNROLL for (int c = 0; c < columns; c++) {
            float product = sum(total[c][r]);
            if (rest) {
                product += rest_of_product(x + r * p->x_stride + vectors_end,
                                           w + c * p->w_stride + vectors_end, rest);
            }
            y[c] = scaled(p, product, y + c);
        }
    }
}

INLINE void columns_of(const Product *p, int column, const int columns) {
    int row = 0;
    for (; row + TILE_ROWS <= p->rows; row += TILE_ROWS) {
        tile(p, row, column, TILE_ROWS, columns);
    }
    switch (p->rows - row) {
    case 1: tile(p, row, column, 1, columns); break;
    case 2: tile(p, row, column, 2, columns); break;
    case 3: tile(p, row, column, 3, columns); break;
    }
}

static void part_of_product(void *work, int part) {
    const Product *p = work;
    int column = part * p->columns_per_part, end = column + p->columns_per_part;
    if (end > p->columns) end = p->columns;
    if (p->rows == 1) {
        for (; column + 2 * TILE_COLUMNS <= end; column += 2 * TILE_COLUMNS) {
            tile(p, 0, column, 1, 2 * TILE_COLUMNS);
        }
    }
    for (; column + TILE_COLUMNS <= end; column += TILE_COLUMNS) {
        columns_of(p, column, TILE_COLUMNS);
    }
    for (; column < end; column++) columns_of(p, column, 1);
}

static void few_rows(Product *p) {
    int64_t per_part = PART_BYTES / (int64_t)sizeof(float) / p->inner;
    p->columns_per_part = (int)(per_part / (2 * TILE_COLUMNS) + 1) * 2 * TILE_COLUMNS;
    int parts = (p->columns + p->columns_per_part - 1) / p->columns_per_part;
    int worth_waking = parts / 2;
    share_out(part_of_product, p, parts, blas.threads < worth_waking ? blas.threads : worth_waking);
}

/* The functions are called from now on. takes_64_bits: whether their sizes and strides are 64-bit
 * integers. Linear layers of up to `most_rows` rows are computed here. */
void holdfast_use_blas(void *sgemm, void *dgemm, void *cgemm, int takes_64_bits, int threads,
                       int most_rows) {
    blas.sgemm = sgemm;
    blas.dgemm = dgemm;
    blas.cgemm = cgemm;
    blas.takes_64_bits = takes_64_bits;
    blas.threads = threads;
    blas.most_rows = most_rows;
}

int holdfast_most_rows(void) { return MOST_ROWS; }

#define PASS_ON(function, type)                                                                   \
    if (blas.takes_64_bits) {                                                                     \
        ((type##64 *)function)(order, of_a, of_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);  \
    } else {                                                                                      \
        ((type *)function)(order, of_a, of_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);      \
    }

void cblas_sgemm(int order, int of_a, int of_b, int m, int n, int k, float alpha, const float *a,
                 int lda, const float *b, int ldb, float beta, float *c, int ldc) {
    int is_linear_layer = order == ROW_MAJOR && of_a == AS_IT_IS && of_b == TRANSPOSED;
    if (is_linear_layer && m <= blas.most_rows && m > 0 && n > 0 && k > 0) {
        few_rows(&(Product){m, n, k, alpha, beta, a, b, c, lda, ldb, ldc, 0});
        return;
    }
    PASS_ON(blas.sgemm, Sgemm)
}

void cblas_dgemm(int order, int of_a, int of_b, int m, int n, int k, double alpha, const double *a,
                 int lda, const double *b, int ldb, double beta, double *c, int ldc) {
    PASS_ON(blas.dgemm, Dgemm)
}

void cblas_cgemm(int order, int of_a, int of_b, int m, int n, int k, const void *alpha,
                 const void *a, int lda, const void *b, int ldb, const void *beta, void *c,
                 int ldc) {
    PASS_ON(blas.cgemm, Cgemm)
}
