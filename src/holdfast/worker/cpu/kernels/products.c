/* The matrix products of MLX: a shim before a BLAS, and products of few rows.
 *
 * MLX calls cblas_sgemm, cblas_dgemm and cblas_cgemm. If this library is loaded before MLX, it gets
 * these calls and passes them on to the BLAS given to `holdfast_use_blas`, whose functions may have
 * other names and take 64-bit integers, like those of the OpenBLAS in numpy's wheel.
 *
 * Products of many rows are cut into parts, which the threads of threads.h compute, each with the BLAS
 * on one thread. The BLAS's own threads would wait for each other after every product, and yield the
 * processor over and over while they wait: beside 12 busy processes, a prompt of 120 tokens took 15
 * times as much processor time as on one thread (docs/lab-log.md).
 *
 * A BLAS copies both matrices into a packed form before it multiplies them. For the few rows of a
 * decode step, copying the weights takes longer than the product itself. So products of few rows
 * are computed here: y = x w^T (linear layers) and y = x w (attention). Each weight is read once
 * for all rows. Each number of the result is added up in the same order whatever the number of
 * rows, so a row has the same result alone and among others.
 *
 * A tile is a few rows and columns of a result, whose sums stay in registers. A part is the share of one
 * thread: the function `run` computes part 0, 1, … of the work that it gets.
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
#define PART_BYTES 131072 /* weights of a part; a thread is woken for two parts or more */
#define SCRATCH_NUMBERS (1 << 19) /* weights that a thread converts at a time: 2 MiB */
#define LEAST_SHARED (1 << 21) /* fewest multiplications of a product that is split */
#define LEAST_CUT 96           /* rows or columns of a part; a BLAS packs the other operand per part */
#define MOST_CUT 512
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16") /* tiles must stay in registers */

#include "vectors.h"

typedef float unaligned_four __attribute__((vector_size(16), aligned(4), may_alias));

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
    int (*get_threads)(void); /* NULL: the thread count of the BLAS cannot be set */
    void (*set_threads)(int);
    int takes_64_bits, threads, most_rows, most_packed_rows;
} blas;

/* The callers that need the BLAS on one thread, and how many threads it had before. */
static struct {
    pthread_mutex_t busy;
    int callers, threads_before;
} alone = {.busy = PTHREAD_MUTEX_INITIALIZER};

/* y = alpha x w^T + beta y. The strides are those from row to row. */
typedef struct {
    int rows, columns, inner;
    float alpha, beta;
    const float *x, *w;
    float *y;
    int64_t x_stride, w_stride, y_stride;
    int columns_per_part;
} Product;

#include "packed_products.h"

/* The product of the last numbers of a row, which do not fill a vector. */
static __attribute__((noinline)) float rest_of_product(const float *x, const float *w, int count) {
    float product = 0;
    for (int at = 0; at < count; at++) product += x[at] * w[at];
    return product;
}

/* alpha product + beta y; y is not read if beta is 0. */
INLINE float scaled(const Product *p, float product, const float *y) {
    return p->beta ? p->alpha * product + p->beta * *y : p->alpha * product;
}

/* Computes `rows` x `columns` results of y = x w^T. rows, columns: constants. */
INLINE void tile(const Product *p, int row, int column, const int rows, const int columns) {
    const float *x = p->x + row * p->x_stride, *w = p->w + column * p->w_stride;
    vec total[2 * TILE_COLUMNS][TILE_ROWS] = {};
    int rest = p->inner % WIDTH, vectors_end = p->inner - rest;
    const float *next = w + columns * p->w_stride; /* fetched in the order of memory */
    for (int at = 0; at < vectors_end; at += WIDTH) {
        vec inputs[TILE_ROWS];
        UNROLL for (int r = 0; r < rows; r++) inputs[r] = load(x + r * p->x_stride + at);
        UNROLL for (int c = 0; c < columns; c++) {
            vec weights = load(w + c * p->w_stride + at);
            __builtin_prefetch(next + at * columns + c * WIDTH, 0, 2);
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

/* Computes `columns` columns of y = x w^T, tile by tile. columns: a constant. */
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

/* Computes `rows` rows and some columns of y = x w, with w in the form [inner, columns], a vector of
 * WIDTH or 4 columns at a time. rows, vectors: constants. */
#define TILE_ACROSS(name, vector)                                                                 \
    INLINE void name(const Product *p, int row, int column, const int rows, const int vectors) {  \
        const int width = sizeof(vector) / sizeof(float);                                         \
        const float *x = p->x + row * p->x_stride, *w = p->w + column;                            \
        vector total[TILE_ROWS][TILE_COLUMNS] = {};                                               \
        for (int at = 0; at < p->inner; at++, w += p->w_stride) {                                 \
            UNROLL for (int v = 0; v < vectors; v++) {                                            \
                vector weights = *(const vector *)(w + v * width);                                \
                UNROLL for (int r = 0; r < rows; r++) {                                           \
                    total[r][v] += weights * x[r * p->x_stride + at];                             \
                }                                                                                 \
            }                                                                                     \
        }                                                                                         \
        UNROLL for (int r = 0; r < rows; r++) {                                                   \
            float *y = p->y + (row + r) * p->y_stride + column;                                   \
            for (int c = 0; c < vectors * width; c++) {                                           \
                y[c] = scaled(p, total[r][c / width][c % width], y + c);                          \
            }                                                                                     \
        }                                                                                         \
    }
TILE_ACROSS(tile_across, vec)
TILE_ACROSS(four_across, unaligned_four)

/* Computes one result of y = x w. */
INLINE void one_across(const Product *p, int row, int column) {
    const float *x = p->x + row * p->x_stride, *w = p->w + column;
    float product = 0, *y = p->y + row * p->y_stride + column;
    for (int at = 0; at < p->inner; at++) product += x[at] * w[at * p->w_stride];
    *y = scaled(p, product, y);
}

/* Computes the columns from `start` to `end` of `rows` rows of y = x w. rows: a constant. */
INLINE void rows_across(const Product *p, int row, const int rows, int start, int end) {
    int column = start;
    for (; column + 4 * WIDTH <= end; column += 4 * WIDTH) tile_across(p, row, column, rows, 4);
    for (; column + WIDTH <= end; column += WIDTH) tile_across(p, row, column, rows, 1);
    for (; column + 4 <= end; column += 4) four_across(p, row, column, rows, 1);
    for (; column < end; column++) {
        for (int r = 0; r < rows; r++) one_across(p, row + r, column);
    }
}

/* Computes a part, some columns, of y = x w. work: a Product. */
static void part_across(void *work, int part) {
    const Product *p = work;
    int start = part * p->columns_per_part, end = start + p->columns_per_part, row = 0;
    if (end > p->columns) end = p->columns;
    for (; row + TILE_ROWS <= p->rows; row += TILE_ROWS) rows_across(p, row, TILE_ROWS, start, end);
    switch (p->rows - row) {
    case 1: rows_across(p, row, 1, start, end); break;
    case 2: rows_across(p, row, 2, start, end); break;
    case 3: rows_across(p, row, 3, start, end); break;
    }
}

/* Computes a part, some columns, of y = x w^T. work: a Product. */
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

/* Runs `run` on parts of about PART_BYTES of weights. Their columns are a multiple of `multiple`. */
static void share_out_columns(Product *p, Part *run, int multiple) {
    int64_t per_part = PART_BYTES / (int64_t)sizeof(float) / p->inner;
    p->columns_per_part = (int)(per_part / multiple + 1) * multiple;
    int parts = (p->columns + p->columns_per_part - 1) / p->columns_per_part;
    int worth_waking = parts / 2;
    share_out(run, p, parts, blas.threads < worth_waking ? blas.threads : worth_waking);
}

/* The first bytes of every stand-in for packed weights (`StandIn`). */
static struct {
    uint8_t bytes[16];
    int is_set;
} key;

void holdfast_set_key(const uint8_t *bytes) {
    memcpy(key.bytes, bytes, sizeof(key.bytes));
    key.is_set = 1;
}

/* Sets the BLAS functions that products are passed on to, and those that get and set its number of
 * threads, or NULL. takes_64_bits: whether sizes and strides are 64-bit integers. Products of up to
 * `most_rows` rows are computed here. */
void holdfast_use_blas(void *sgemm, void *dgemm, void *cgemm, void *get_threads, void *set_threads,
                       int takes_64_bits, int threads, int most_rows) {
    blas.sgemm = sgemm;
    blas.dgemm = dgemm;
    blas.cgemm = cgemm;
    blas.get_threads = (int (*)(void))get_threads;
    blas.set_threads = (void (*)(int))set_threads;
    blas.takes_64_bits = takes_64_bits;
    blas.threads = threads;
    blas.most_rows = most_rows;
}

int holdfast_most_rows(void) { return MOST_ROWS; }

/* Products with packed weights of more than this many rows of x are computed by the BLAS. */
void holdfast_set_most_packed_rows(int rows) { blas.most_packed_rows = rows; }

#define PASS_ON(function, type)                                                                   \
    if (blas.takes_64_bits) {                                                                     \
        ((type##64 *)function)(order, of_a, of_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);  \
    } else {                                                                                      \
        ((type *)function)(order, of_a, of_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);      \
    }

static void blas_sgemm(int order, int of_a, int of_b, int m, int n, int k, float alpha,
                       const float *a, int lda, const float *b, int ldb, float beta, float *c,
                       int ldc) {
    PASS_ON(blas.sgemm, Sgemm)
}

/* Until `holdfast_end_one_thread`, the BLAS computes each product on the calling thread. The thread
 * count is process-wide, and other code may use the BLAS too, so it is restored. */
void holdfast_begin_one_thread(void) {
    if (!blas.set_threads) return;
    pthread_mutex_lock(&alone.busy);
    if (!alone.callers++) {
        alone.threads_before = blas.get_threads();
        blas.set_threads(1);
    }
    pthread_mutex_unlock(&alone.busy);
}

void holdfast_end_one_thread(void) {
    if (!blas.set_threads) return;
    pthread_mutex_lock(&alone.busy);
    if (!--alone.callers) blas.set_threads(alone.threads_before);
    pthread_mutex_unlock(&alone.busy);
}

/* The size of equal parts of `count` rows or columns: about LEAST_CUT to MOST_CUT, in a number of
 * parts that gives each thread the same work. */
static int cut_of(int count) {
    int most = (count + LEAST_CUT - 1) / LEAST_CUT, parts = (count + MOST_CUT - 1) / MOST_CUT;
    parts = (parts + blas.threads - 1) / blas.threads * blas.threads;
    if (parts > most) parts = most;
    return ((count + parts - 1) / parts + 15) / 16 * 16; /* a multiple of the tiles of a BLAS */
}

/* A product in row-major order, c = alpha a b + beta c, that is split by its rows or its columns into parts
 * of `cut` rows or columns. Names as in CBLAS; of_a, of_b: AS_IT_IS or TRANSPOSED. */
typedef struct {
    int of_a, of_b, m, n, k, lda, ldb, ldc;
    float alpha, beta;
    const float *a, *b;
    float *c;
    int cut, cuts_rows;
} CutProduct;

static void part_of_cut_product(void *work, int part) {
    const CutProduct *p = work;
    int first = part * p->cut, left = (p->cuts_rows ? p->m : p->n) - first;
    int count = left < p->cut ? left : p->cut;
    int64_t row = p->cuts_rows ? first : 0, column = p->cuts_rows ? 0 : first;
    blas_sgemm(ROW_MAJOR, p->of_a, p->of_b, p->cuts_rows ? count : p->m, p->cuts_rows ? p->n : count,
               p->k, p->alpha, p->a + (p->of_a == TRANSPOSED ? row : row * p->lda), p->lda,
               p->b + (p->of_b == TRANSPOSED ? column * p->ldb : column), p->ldb, p->beta,
               p->c + row * p->ldc + column, p->ldc);
}

/* Like `blas_sgemm`, on the threads of threads.h. */
static void shared_sgemm(int order, int of_a, int of_b, int m, int n, int k, float alpha,
                         const float *a, int lda, const float *b, int ldb, float beta, float *c,
                         int ldc) {
    CutProduct p = {of_a, of_b, m, n, k, lda, ldb, ldc, alpha, beta, a, b, c, 0, m > n};
    int whole = m > n ? m : n, is_plain = of_b == AS_IT_IS || of_b == TRANSPOSED;
    p.cut = whole;
    if (order == ROW_MAJOR && is_plain && (int64_t)m * n * k >= LEAST_SHARED) p.cut = cut_of(whole);
    holdfast_begin_one_thread();
    if (!blas.set_threads || p.cut >= whole) {
        blas_sgemm(order, of_a, of_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    } else {
        share_out(part_of_cut_product, &p, (whole + p.cut - 1) / p.cut, blas.threads);
    }
    holdfast_end_one_thread();
}

/* Makes an error visible in the logits. */
static void fill_with_nan(float *y, int rows, int columns, int64_t stride) {
    for (int row = 0; row < rows; row++) {
        float *of_row = y + row * stride;
        for (int column = 0; column < columns; column++) of_row[column] = __builtin_nanf("");
    }
}

/* A copy of x, given as [inner, rows], as [rows, inner]. NULL if memory is short. */
static float *transposed(const float *x, int rows, int inner, int64_t stride) {
    float *copy = malloc(sizeof(float) * rows * inner);
    for (int row = 0; copy && row < rows; row++) {
        for (int at = 0; at < inner; at++) copy[(int64_t)row * inner + at] = x[at * stride + row];
    }
    return copy;
}

/* A product with packed weights and many rows of x. Each part is some weight rows, which the thread
 * converts, and multiplies by the BLAS. */
typedef struct {
    const PackedCall *call;
    int cut;            /* weight rows of a part */
    _Atomic int failed; /* out of memory */
} ManyRows;

static pthread_key_t converted; /* of each thread: SCRATCH_NUMBERS numbers */
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void make_key(void) { pthread_key_create(&converted, free); }

/* Memory for the converted weights of a part; NULL if memory is short. */
static float *scratch_of_thread(void) {
    pthread_once(&once, make_key);
    float *numbers = pthread_getspecific(converted);
    if (!numbers && (numbers = malloc(sizeof(float) * SCRATCH_NUMBERS))) {
        pthread_setspecific(converted, numbers);
    }
    return numbers;
}

/* Converts the weight rows of a part and multiplies all rows of x by them. work: a ManyRows. */
static void part_of_many_rows(void *work, int part) {
    ManyRows *many = work;
    const PackedCall *call = many->call;
    const Packed *w = call->w;
    int first = call->first + part * many->cut, left = call->end - first;
    int count = left < many->cut ? left : many->cut;
    int64_t numbers = (int64_t)count * w->inputs;
    int fits = numbers <= SCRATCH_NUMBERS;
    float *room = fits ? scratch_of_thread() : malloc(sizeof(float) * numbers);
    if (!room) {
        atomic_store(&many->failed, 1);
        return;
    }
    convert_packed(w, first, first + count, room);
    blas_sgemm(ROW_MAJOR, AS_IT_IS, TRANSPOSED, call->rows, count, w->inputs, call->alpha, call->x,
               (int)call->x_stride, room, w->inputs, call->beta, call->y + first - call->first,
               (int)call->y_stride);
    if (!fits) free(room);
}

/* y = alpha x w^T + beta y for many rows. Returns 0 if out of memory. */
static int many_rows(const PackedCall *call) {
    ManyRows many = {.call = call, .cut = cut_of(call->end - call->first)};
    int fits = SCRATCH_NUMBERS / call->w->inputs / 16 * 16;
    if (many.cut > fits) many.cut = fits > 16 ? fits : 16;
    int parts = (call->end - call->first + many.cut - 1) / many.cut;
    holdfast_begin_one_thread();
    share_out(part_of_many_rows, &many, parts, blas.set_threads ? blas.threads : 1);
    holdfast_end_one_thread();
    return !atomic_load(&many.failed);
}

/* y = alpha x w^T + beta y for the weight rows (outputs) from `first` to `end`. x: [rows, inputs], y:
 * [rows, end - first]. Returns 0 if memory is short. */
int holdfast_multiply_packed(const Packed *w, int first, int end, int rows, float alpha,
                             const float *x, int64_t x_stride, float beta, float *y,
                             int64_t y_stride) {
    PackedCall call = {w, alpha, beta, x, y, x_stride, y_stride, rows, first, end, 0, NULL};
    if (rows > blas.most_packed_rows && blas.sgemm) return many_rows(&call);
    return packed_product(&call, blas.threads);
}

#include "decoder.h"

/* The first bytes of a stand-in: a matrix that MLX multiplies by as by any other, but whose product
 * is computed from the stored weights. Its other numbers are never read. The key is random, so that
 * no model's weights begin with it. */
typedef struct {
    uint8_t key[16];
    Packed weights;
} StandIn;

/* y = alpha x w^T + beta y. Returns 0 if the shapes do not match or memory is short. */
static int stand_in_product(const StandIn *b, int rows, int columns, int inner, const float *x,
                            int64_t x_stride, float alpha, float beta, float *y,
                            int64_t y_stride) {
    return b->weights.inputs == inner && b->weights.outputs == columns &&
           holdfast_multiply_packed(&b->weights, 0, columns, rows, alpha, x, x_stride, beta, y,
                                    y_stride);
}

/* What MLX calls for every float32 product: c = alpha a b + beta c. Computes products with stand-ins and
 * those of few rows, and passes all others on to the BLAS. */
void cblas_sgemm(int order, int of_a, int of_b, int m, int n, int k, float alpha, const float *a,
                 int lda, const float *b, int ldb, float beta, float *c, int ldc) {
    if (order != ROW_MAJOR || m <= 0 || n <= 0 || k <= 0) {
        blas_sgemm(order, of_a, of_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
        return;
    }
    if (key.is_set && (int64_t)n * k * sizeof(float) >= sizeof(StandIn) &&
        !memcmp(b, key.bytes, sizeof(key.bytes))) {
        float *rows = of_a == TRANSPOSED ? transposed(a, m, k, lda) : NULL;
        if (ldb != k || of_b != TRANSPOSED || (of_a == TRANSPOSED && !rows) ||
            !stand_in_product((const StandIn *)b, m, n, k, rows ? rows : a, rows ? k : lda, alpha,
                              beta, c, ldc)) {
            fill_with_nan(c, m, n, ldc); /* CBLAS cannot report errors */
        }
        free(rows);
        return;
    }
    if (of_a != AS_IT_IS || m > blas.most_rows) {
        shared_sgemm(order, of_a, of_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
        return;
    }
    Product product = {m, n, k, alpha, beta, a, b, c, lda, ldb, ldc, 0};
    if (of_b == TRANSPOSED) share_out_columns(&product, part_of_product, 2 * TILE_COLUMNS);
    else share_out_columns(&product, part_across, 4 * WIDTH);
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
