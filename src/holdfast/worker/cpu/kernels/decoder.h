/* A forward pass of few tokens through a decoder like Llama's, from token ids to logits: what MLX
 * would compute in dozens of operations per layer. A layer is: normalization, projections, optionally
 * normalized heads, rotary embedding, attention and a residual connection; then normalization, a
 * gated MLP, and another residual connection.
 *
 * Included by products.c.
 */
#include "decode_attention.h"

#include <math.h>

typedef struct {
    const float *weights; /* [outputs, inputs]; NULL: `packed` */
    const float *bias;    /* [outputs], or NULL */
    Packed packed;
    int32_t outputs, inputs;
} Linear;

typedef struct {
    Linear query, key, value, output, gate, up, down;
    const float *norm, *mlp_norm;       /* [hidden] */
    const float *query_norm, *key_norm; /* [head_dimension], or NULL */
} Layer;

typedef struct {
    const Layer *layers;
    Linear embedding, head; /* [vocabulary, hidden] */
    const float *norm;      /* [hidden] */
    float epsilon, head_epsilon;
    float query_scale;
    int32_t layer_count, hidden, heads, kv_heads, head_dimension;
    int32_t rotated;  /* the first numbers of a head, which are rotated */
    int32_t in_pairs; /* whether neighbours are rotated together, not numbers of both halves */
} Decoder;

/* A token is a row. Its keys and values are written to the buffer of its sequence, [2 * kv_heads,
 * capacity, head_dimension], the heads of the keys first. */
typedef struct {
    const Decoder *decoder;
    const int32_t *token_ids; /* [rows] */
    const float *factors;     /* [rows, 2 * rotated]: cosines and sines of each token's position */
    float *const *places;     /* [layers, rows]: where the first key head of the token goes */
    const int64_t *capacities; /* [rows] */
    const int32_t *wanted;    /* [wanted_count]: the rows whose logits are computed */
    float *logits;            /* [wanted_count, vocabulary] */
    /* for holdfast_decode only */
    const Run *runs;          /* [layers, run_count]: what attention sees, with the new tokens */
    const int32_t *row_ids;   /* of the runs */
    int (*attend)(const AttentionCall *);
    int32_t rows, run_count, wanted_count, chunk_tokens, attention_threads;
} DecoderCall;

/* y = x w^T + b + beta y, for x: [rows, inputs] and y: [rows, outputs]. Returns 0 if memory is short. */
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
        shared_sgemm(ROW_MAJOR, AS_IT_IS, TRANSPOSED, rows, l->outputs, l->inputs, 1, x,
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

/* Rotates the first numbers of a head in place, and multiplies the head by `scale`. The sines contain
 * the sign of their term. */
static void rotate(float *head, const Decoder *p, const float *cosines, const float *sines,
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

/* Queries, keys and values of all heads, [rows, heads + 2 * kv_heads, head_dimension], from the
 * normalized input. */
static int project(const Decoder *p, const Layer *layer, const DecoderCall *call,
                   const float *normal, float *heads) {
    int d = p->head_dimension, hidden = p->hidden;
    int64_t stride = (int64_t)(p->heads + 2 * p->kv_heads) * d;
    float *keys = heads + p->heads * d, *values = keys + p->kv_heads * d;
    if (!linear(&layer->query, call->rows, normal, hidden, 0, heads, stride) ||
        !linear(&layer->key, call->rows, normal, hidden, 0, keys, stride) ||
        !linear(&layer->value, call->rows, normal, hidden, 0, values, stride)) {
        return 0;
    }
    for (int64_t row = 0; row < call->rows; row++) {
        const float *cosines = call->factors + row * 2 * p->rotated, *sines = cosines + p->rotated;
        for (int head = 0; head < p->heads + p->kv_heads; head++) {
            float *of_head = heads + row * stride + head * d;
            int is_query = head < p->heads;
            const float *norm = is_query ? layer->query_norm : layer->key_norm;
            if (norm) normalize(of_head, norm, p->head_epsilon, d, of_head);
            rotate(of_head, p, cosines, sines, is_query ? p->query_scale : 1);
        }
    }
    return 1;
}

/* Copies the queries of all rows to `queries`, and keys and values to the buffers of the sequences.
 * heads: as `project` returns them. places: where the first key head of each row goes. */
static void put_away(const Decoder *p, const DecoderCall *call, float *const *places,
                     const float *heads, float *queries) {
    int d = p->head_dimension, of_row = p->heads * d;
    const float *from = heads;
    for (int row = 0; row < call->rows; row++) {
        memcpy(queries + (int64_t)row * of_row, from, sizeof(float) * of_row);
        from += of_row;
        for (int head = 0; head < 2 * p->kv_heads; head++, from += d) {
            memcpy(places[row] + head * call->capacities[row] * d, from, sizeof(float) * d);
        }
    }
}

/* Computes the queries of all rows from x, [rows, hidden], the input of layer `number`, and adds the keys
 * and values to the buffers. queries: [rows, heads, head_dimension]. Returns 0 if memory is short. */
int holdfast_before_attention(const DecoderCall *call, int number, const float *x, float *queries) {
    const Decoder *p = call->decoder;
    const Layer *layer = &p->layers[number];
    int64_t rows = call->rows, hidden = p->hidden;
    int64_t of_heads = (int64_t)(p->heads + 2 * p->kv_heads) * p->head_dimension;
    float *normal = malloc(sizeof(float) * rows * (hidden + of_heads));
    if (!normal) return 0;
    float *heads = normal + rows * hidden;
    for (int64_t row = 0; row < rows; row++) {
        normalize(x + row * hidden, layer->norm, p->epsilon, hidden, normal + row * hidden);
    }
    int done = project(p, layer, call, normal, heads);
    if (done) put_away(p, call, call->places + number * rows, heads, queries);
    free(normal);
    return done;
}

/* Computes what follows attention in layer `number`: its output projection and the MLP. x: [rows,
 * hidden], the input of the layer, and then its result. attended: [rows, heads, head_dimension].
 * Returns 0 if memory is short. */
int holdfast_after_attention(const DecoderCall *call, int number, const float *attended, float *x) {
    const Decoder *p = call->decoder;
    const Layer *layer = &p->layers[number];
    int64_t rows = call->rows, hidden = p->hidden, inner = layer->gate.outputs;
    float *normal = malloc(sizeof(float) * rows * (hidden + 2 * inner));
    if (!normal) return 0;
    float *gate = normal + rows * hidden, *up = gate + rows * inner;
    int done = linear(&layer->output, rows, attended, (int64_t)p->heads * p->head_dimension, 1, x,
                      hidden);
    for (int64_t row = 0; done && row < rows; row++) {
        normalize(x + row * hidden, layer->mlp_norm, p->epsilon, hidden, normal + row * hidden);
    }
    done = done && linear(&layer->gate, rows, normal, hidden, 0, gate, inner) &&
           linear(&layer->up, rows, normal, hidden, 0, up, inner);
    for (int64_t row = 0; done && row < rows; row++) {
        gated(gate + row * inner, up + row * inner, inner);
    }
    done = done && linear(&layer->down, rows, gate, inner, 1, x, hidden);
    free(normal);
    return done;
}

/* Copies the embedding of one token to x, [hidden], or converts it if it is packed. */
static void embed(const Linear *embedding, int32_t token_id, float *x) {
    if (embedding->weights) {
        memcpy(x, embedding->weights + (int64_t)token_id * embedding->inputs,
               sizeof(float) * embedding->inputs);
    } else {
        convert_packed(&embedding->packed, token_id, token_id + 1, x);
    }
}

/* Writes the input of the first layer, the embeddings of all rows, to x: [rows, hidden]. */
void holdfast_embed(const DecoderCall *call, float *x) {
    const Linear *embedding = &call->decoder->embedding;
    for (int64_t row = 0; row < call->rows; row++) {
        embed(embedding, call->token_ids[row], x + row * embedding->inputs);
    }
}

/* Computes the logits of the wanted rows. x: [rows, hidden], the result of the last layer. Returns 0
 * if memory is short. */
int holdfast_project(const DecoderCall *call, const float *x) {
    const Decoder *p = call->decoder;
    int64_t hidden = p->hidden;
    if (!call->wanted_count) return 1;
    float *normal = malloc(sizeof(float) * call->wanted_count * hidden);
    if (!normal) return 0;
    for (int64_t at = 0; at < call->wanted_count; at++) {
        normalize(x + call->wanted[at] * hidden, p->norm, p->epsilon, hidden, normal + at * hidden);
    }
    int done = linear(&p->head, call->wanted_count, normal, hidden, 0, call->logits,
                      p->head.outputs);
    free(normal);
    return done;
}

/* A whole forward pass, from token ids to logits, with attention by `call->attend`. Returns 0 if memory
 * is short. */
int holdfast_decode(const DecoderCall *call) {
    const Decoder *p = call->decoder;
    int64_t of_heads = (int64_t)call->rows * p->heads * p->head_dimension;
    float *x = malloc(sizeof(float) * ((int64_t)call->rows * p->hidden + 2 * of_heads));
    if (!x) return 0;
    float *queries = x + (int64_t)call->rows * p->hidden, *attended = queries + of_heads;
    holdfast_embed(call, x);
    int done = 1;
    for (int at = 0; done && at < p->layer_count; at++) {
        AttentionCall attention = {
            .queries = queries, .out = attended, .runs = call->runs + (int64_t)at * call->run_count,
            .row_ids = call->row_ids, .rows = call->rows, .heads = p->heads,
            .kv_heads = p->kv_heads, .key_d = p->head_dimension, .value_d = p->head_dimension,
            .run_count = call->run_count, .chunk_tokens = call->chunk_tokens,
            .threads = call->attention_threads, .share_out = share_out};
        done = holdfast_before_attention(call, at, x, queries) && !call->attend(&attention) &&
               holdfast_after_attention(call, at, attended, x);
    }
    done = done && holdfast_project(call, x);
    free(x);
    return done;
}
