/* The parts of a decoder layer before and after attention, for the few rows of a decode step: what
 * MLX would compute in dozens of operations. Layers as in Llama and Qwen: normalization, projections,
 * optionally normalized heads, rotary embedding; then the output projection, a residual connection,
 * normalization, a gated MLP, and another residual connection.
 *
 * Included by products.c.
 */
#include <math.h>

typedef struct {
    const float *weights; /* [outputs, inputs]; NULL: `packed` */
    const float *bias;    /* [outputs], or NULL */
    Packed packed;
    int32_t outputs, inputs;
} Linear;

typedef struct {
    Linear query, key, value;
    const float *norm;                  /* [hidden] */
    const float *query_norm, *key_norm; /* [head_dimension], or NULL */
    float epsilon, head_epsilon;
    float query_scale;
    int32_t hidden, heads, kv_heads, head_dimension;
    int32_t rotated; /* the first numbers of a head, which are rotated */
    int32_t in_pairs; /* whether neighbours are rotated together, not numbers of both halves */
} BeforeAttention;

typedef struct {
    Linear output, gate, up, down;
    const float *norm; /* [hidden] */
    float epsilon;
    int32_t hidden;
} AfterAttention;

static int outputs_before(const BeforeAttention *p) {
    return (p->heads + 2 * p->kv_heads) * p->head_dimension;
}

/* y = x w^T + b + beta y. Returns 0 if memory is short. */
static int linear(const Linear *l, int rows, const float *x, int64_t x_stride, float beta, float *y,
                  int64_t y_stride) {
    if (!l->weights) {
        if (!holdfast_multiply_packed(&l->packed, 0, l->outputs, rows, 1, x, x_stride, beta, y,
                                      y_stride)) {
            return 0;
        }
    } else if (rows <= blas.most_rows) {
        Product product = {rows, l->outputs, l->inputs, 1, beta,     x,
                           l->weights, y, x_stride, l->inputs, y_stride, 0};
        share_out_columns(&product, part_of_product, 2 * TILE_COLUMNS);
    } else {
        blas_sgemm(ROW_MAJOR, AS_IT_IS, TRANSPOSED, rows, l->outputs, l->inputs, 1, x,
                   (int)x_stride, l->weights, l->inputs, beta, y, (int)y_stride);
    }
    if (!l->bias) return 1;
    for (int row = 0; row < rows; row++) {
        for (int at = 0; at < l->outputs; at++) y[row * y_stride + at] += l->bias[at];
    }
    return 1;
}

/* to = from / sqrt(mean of squares + epsilon) * weights; in place if both are the same. */
static void normalize(const float *from, const float *weights, float epsilon, int count,
                      float *to) {
    vec squares = {};
    int at = 0;
    for (; at + WIDTH <= count; at += WIDTH) squares += load(from + at) * load(from + at);
    float total = sum(squares);
    for (; at < count; at++) total += from[at] * from[at];
    float factor = 1 / sqrtf(total / count + epsilon);
    for (at = 0; at < count; at++) to[at] = from[at] * factor * weights[at];
}

/* Multiplies a head by its scale and rotates it. The sines contain the sign of their term. */
static void rotate(float *head, const BeforeAttention *p, const float *cosines, const float *sines,
                   float scale) {
    int half = p->rotated / 2;
    float before[p->rotated + 1];
    memcpy(before, head, sizeof(float) * p->rotated);
    for (int at = 0; at < p->rotated; at++) {
        int other = p->in_pairs ? at ^ 1 : at < half ? at + half : at - half;
        head[at] = before[at] * cosines[at] + before[other] * sines[at];
    }
    if (scale == 1) return;
    for (int at = 0; at < p->head_dimension; at++) head[at] *= scale;
}

/* x: [rows, hidden]. On entry, each row of y begins with the cosines and sines of its position,
 * `rotated` of each; on return, it has queries, keys and values of all heads. Returns 0 if memory is
 * short. */
static int before_attention(const BeforeAttention *p, int rows, const float *x, int64_t x_stride,
                            float *y, int64_t y_stride) {
    int d = p->head_dimension, hidden = p->hidden;
    int64_t per_row = hidden + 2 * p->rotated;
    float *memory = malloc(sizeof(float) * rows * per_row);
    if (!memory) return 0;
    float *normal = memory, *factors = memory + (int64_t)rows * hidden;
    for (int64_t row = 0; row < rows; row++) {
        normalize(x + row * x_stride, p->norm, p->epsilon, hidden, normal + row * hidden);
        memcpy(factors + row * 2 * p->rotated, y + row * y_stride, sizeof(float) * 2 * p->rotated);
    }
    float *keys = y + p->heads * d, *values = keys + p->kv_heads * d;
    int done = linear(&p->query, rows, normal, hidden, 0, y, y_stride) &&
               linear(&p->key, rows, normal, hidden, 0, keys, y_stride) &&
               linear(&p->value, rows, normal, hidden, 0, values, y_stride);
    for (int64_t row = 0; done && row < rows; row++) {
        const float *cosines = factors + row * 2 * p->rotated, *sines = cosines + p->rotated;
        for (int head = 0; head < p->heads + p->kv_heads; head++) {
            float *of_head = y + row * y_stride + head * d;
            int is_query = head < p->heads;
            const float *norm = is_query ? p->query_norm : p->key_norm;
            if (norm) normalize(of_head, norm, p->head_epsilon, d, of_head);
            rotate(of_head, p, cosines, sines, is_query ? p->query_scale : 1);
        }
    }
    free(memory);
    return done;
}

/* gate = gate * sigmoid(gate) * up */
static void gated(float *gate, const float *up, int count) {
    int at = 0;
    for (; at + WIDTH <= count; at += WIDTH) {
        vec x = load(gate + at), smaller = exponential(-larger(x, -x));
        vec sigmoid = choose(x > 0, splat(1), smaller) / (smaller + 1);
        store(gate + at, x * sigmoid * load(up + at));
    }
    for (; at < count; at++) gate[at] = gate[at] / (1 + expf(-gate[at])) * up[at];
}

/* attended: [rows, inputs of `output`]. On entry, y is the layer's input, [rows, hidden]; on return,
 * its result. Returns 0 if memory is short. */
static int after_attention(const AfterAttention *p, int rows, const float *attended,
                           int64_t stride, float *y, int64_t y_stride) {
    int hidden = p->hidden, inner = p->gate.outputs;
    float *memory = malloc(sizeof(float) * rows * ((int64_t)hidden + 2 * inner));
    if (!memory) return 0;
    float *normal = memory, *gate = normal + (int64_t)rows * hidden;
    float *up = gate + (int64_t)rows * inner;
    int done = linear(&p->output, rows, attended, stride, 1, y, y_stride);
    for (int64_t row = 0; done && row < rows; row++) {
        normalize(y + row * y_stride, p->norm, p->epsilon, hidden, normal + row * hidden);
    }
    done = done && linear(&p->gate, rows, normal, hidden, 0, gate, inner) &&
           linear(&p->up, rows, normal, hidden, 0, up, inner);
    for (int64_t row = 0; done && row < rows; row++) {
        gated(gate + row * inner, up + row * inner, inner);
    }
    if (done) {
        done = linear(&p->down, rows, gate, inner, 1, y, y_stride);
    }
    free(memory);
    return done;
}
