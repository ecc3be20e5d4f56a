/* Attention of decoding sequences over keys and values in float32, or quantized to 8, 5 or 4 bits
 * in groups of 64 or 32 dimensions. Plain C with the vector extensions of GCC and Clang.
 *
 * One call computes one layer of a step. Its keys and values come in runs of adjoining tokens. A
 * run is read once for all rows (sequences) that hold it, so a prefix that many sequences share
 * costs its bytes once. For each run and row, the kernel computes (o, m, l): the weighted sum of
 * the values, the largest score, and the sum of the weights. The results of a row's runs are then
 * merged exactly:
 *
 *     M = max m_i,   out = sum o_i exp(m_i - M) / sum l_i exp(m_i - M)
 *
 * Quantized codes are converted to float tile by tile. Scales and biases are applied to the scores
 * and to the weights, once per token and group, never to the codes:
 *
 *     q . k = scale (q . codes) + bias sum(q),   p v = (p scale) codes + p bias
 *
 * A task is the share of one thread; its results (o, m, l) for a query are a partial. In names, m is the
 * number of a query within a task, t of a token within a tile, g of a group of dimensions.
 */
#include "decode_attention.h"
#include "threads.h"

#include <stdlib.h>
#include <string.h>

/* The floats in a vector register. Longer vectors would be slow: GCC spills them to memory. */
#if defined __AVX512F__
#define WIDTH 16
#elif defined __AVX__
#define WIDTH 8
#else
#define WIDTH 4
#endif
#define DIMENSION_UNIT 16 /* head dimensions must be a multiple of this */
#define TOGETHER 4     /* vector accumulators per query; two queries are computed at a time */
#define TILE 128       /* tokens; a float tile of 64 dimensions then fits the L1 cache */
#define GROUP 64       /* dimensions that share a scale and a bias, at most */
#define MOST_D 640     /* largest head dimension of quantized keys and values */
#define MOST_QUERIES 64 /* queries that one task computes: bounds its memory on the stack */
#define NO_SCORE -3.0e38f

#include "vectors.h"

typedef _Float16 half_vec __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));

/* Some tokens of a run, for one key head and some of the run's rows. */
typedef struct {
    int32_t run, kv_head, start, end, first_row, rows; /* first_row: in the call's row_ids */
    int64_t first_partial; /* the number of the partial of the first query */
} Task;

typedef struct {
    const AttentionCall *call;
    Task *tasks;
    int task_count;
    float *o;     /* [partials, value_d] */
    float *m, *l; /* [partials] */
} Job;

/* How many dimensions share a scale and a bias; as `group_of` in kv/quantized.py. */
static inline int group_of(int dimension) { return dimension % GROUP ? GROUP / 2 : GROUP; }

/* Eight codes of 5 bits are in 5 bytes, the first one in the lowest bits. */
static inline void unpack5(const uint8_t *codes, int group, float *restrict tile) {
    typedef int32_t i8 __attribute__((vector_size(32)));
    typedef float f8 __attribute__((vector_size(32), aligned(4), may_alias));
    const i8 shifts = {0, 5, 10, 15, 0, 5, 10, 15};
    for (int i = 0; i < group; i += 8, codes += 5) {
        int32_t low = codes[0] | codes[1] << 8 | (codes[2] & 15) << 16;
        int32_t high = codes[2] >> 4 | codes[3] << 4 | codes[4] << 12;
        i8 both = {low, low, low, low, high, high, high, high};
        *(f8 *)(tile + i) = __builtin_convertvector(both >> shifts & 31, f8);
    }
}

/* The codes of one group as floats. Compilers turn these loops into wide conversions. 4 bits: even
 * dimensions first, then odd ones; queries and results are permuted to match. */
static inline __attribute__((always_inline)) void unpack_as(
    const uint8_t *codes, int64_t stride, int tokens, int bits, int group, float *restrict tile) {
    for (int t = 0; t < tokens; t++, codes += stride, tile += group) {
        if (bits == 8) {
            for (int i = 0; i < group; i++) tile[i] = codes[i];
            continue;
        }
        if (bits == 5) {
            unpack5(codes, group, tile);
            continue;
        }
        for (int i = 0; i < group / 2; i++) tile[i] = codes[i] & 15;
        for (int i = 0; i < group / 2; i++) tile[group / 2 + i] = codes[i] >> 4;
    }
}

/* tile: [tokens, group]. */
static void unpack(const uint8_t *codes, int64_t stride, int tokens, int bits, int group,
                   float *tile) {
    if (group == GROUP) { /* a constant number of steps */
        if (bits == 8) unpack_as(codes, stride, tokens, 8, GROUP, tile);
        else if (bits == 5) unpack_as(codes, stride, tokens, 5, GROUP, tile);
        else unpack_as(codes, stride, tokens, 4, GROUP, tile);
    } else {
        if (bits == 8) unpack_as(codes, stride, tokens, 8, GROUP / 2, tile);
        else if (bits == 5) unpack_as(codes, stride, tokens, 5, GROUP / 2, tile);
        else unpack_as(codes, stride, tokens, 4, GROUP / 2, tile);
    }
}

/* Copies a query in the order of codes of 4 bits: in each group, even dimensions first, then odd ones. */
static void permute(const float *from, float *restrict to, int count, int group) {
    for (int g = 0; g < count; g += group) {
        for (int i = 0; i < group; i++) to[g + i / 2 + (i & 1) * (group / 2)] = from[g + i];
    }
}

/* Puts the dimensions of a result back in order, after `permute`. */
static void undo_permute(float *at, int count, int group) {
    float copy[GROUP];
    for (int g = 0; g < count; g += group) {
        memcpy(copy, at + g, sizeof(float) * group);
        for (int i = 0; i < group; i++) at[g + i] = copy[i / 2 + (i & 1) * (group / 2)];
    }
}

/* Float16 to float32. */
static inline void widen(const _Float16 *from, float *out, int count) {
    int i = 0;
    for (; i + WIDTH <= count; i += WIDTH) {
        store(out + i, __builtin_convertvector(*(const half_vec *)(from + i), vec));
    }
    for (; i < count; i++) out[i] = (float)from[i];
}

#if WIDTH >= 8 && defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SUMS_TOGETHER 1 /* WIDTH sums fit in the registers */
#endif
#endif

#ifdef SUMS_TOGETHER
/* Lane i of the result is the sum of the lanes i and i ^ step: of a if bit `step` of i is 0, of b
 * if it is 1. */
#define LANE(i, step) ((i) & (step) ? WIDTH + (i) : (i))
#define OTHER(i, step) ((i) & (step) ? WIDTH + ((i) ^ (step)) : (i) ^ (step))
#define EIGHT(of, step) \
    of(0, step), of(1, step), of(2, step), of(3, step), of(4, step), of(5, step), of(6, step), \
        of(7, step)
#if WIDTH == 16
#define ALL(of, step) \
    EIGHT(of, step), of(8, step), of(9, step), of(10, step), of(11, step), of(12, step), \
        of(13, step), of(14, step), of(15, step)
#else
#define ALL EIGHT
#endif
#define FOLD(a, b, step)                                  \
    (__builtin_shufflevector(a, b, ALL(LANE, step)) + \
     __builtin_shufflevector(a, b, ALL(OTHER, step)))

/* Lane i of the result is the sum of the lanes of v[i]. */
static inline vec sum_each(vec *v) {
#if WIDTH == 16
    for (int i = 0; i < 8; i++) v[i] = FOLD(v[i], v[i + 8], 8);
#endif
    for (int i = 0; i < 4; i++) v[i] = FOLD(v[i], v[i + 4], 4);
    for (int i = 0; i < 2; i++) v[i] = FOLD(v[i], v[i + 2], 2);
    return FOLD(v[0], v[1], 1);
}
#endif

/* out[m, t] = q[m] . key[t], over `count` dimensions. queries: the constant 1, 2 or 4. */
static inline __attribute__((always_inline)) void dots(int queries, const float *const *q,
                                                       const float *keys, int64_t stride,
                                                       int tokens, int count, float *out) {
    int t = 0;
#ifdef SUMS_TOGETHER
    int together = WIDTH / queries;
    for (; t + together <= tokens; t += together) {
        vec v[WIDTH] = {};
        for (int i = 0; i < count; i += WIDTH) {
            for (int s = 0; s < together; s++) {
                vec part = load(keys + (t + s) * stride + i);
                for (int m = 0; m < queries; m++) v[m * together + s] += part * load(q[m] + i);
            }
        }
        vec sums = sum_each(v);
        for (int m = 0; m < queries; m++) {
            memcpy(out + m * TILE + t, (float *)&sums + m * together, sizeof(float) * together);
        }
    }
#endif
    for (; t < tokens; t++) {
        vec v[4] = {};
        for (int i = 0; i < count; i += WIDTH) {
            vec part = load(keys + t * stride + i);
            for (int m = 0; m < queries; m++) v[m] += part * load(q[m] + i);
        }
        for (int m = 0; m < queries; m++) out[m * TILE + t] = sum(v[m]);
    }
}

/* scores[m, t] (+)= scale[t] * (q[m] . key[t]) + bias[t] * q_sum[m], over `count` dimensions.
 * scale: NULL if the keys are not quantized. is_first: scores are set, not added to. */
static void score(int queries, const float *const *q, const float *keys, int64_t stride, int tokens,
                  int count, const float *q_sum, const float *scale, const float *bias,
                  float *scores, int is_first) {
    float products[4 * TILE] __attribute__((aligned(64)));
    for (int first = 0; first < queries;) {
        int left = queries - first, group = left > 3 ? 4 : left > 1 ? 2 : 1;
        float *to = scores + first * TILE, *out = scale ? products : to;
        if (group == 4) dots(4, q + first, keys, stride, tokens, count, out);
        else if (group == 2) dots(2, q + first, keys, stride, tokens, count, out);
        else dots(1, q + first, keys, stride, tokens, count, out);
        for (int m = 0; scale && m < group; m++, to += TILE, out += TILE) {
            for (int t = 0; t < tokens; t++) {
                float value = scale[t] * out[t] + bias[t] * q_sum[first + m];
                to[t] = is_first ? value : to[t] + value;
            }
        }
        first += group;
    }
}

/* a += sum over t of w0[t] * value[t], b += the same with w1, over `count` dimensions, which must
 * be a constant for the sums to stay in registers. */
static inline __attribute__((always_inline)) void weigh(const float *w0, const float *w1,
                                                        const float *value, int64_t stride,
                                                        int tokens, int count, vec *a, vec *b) {
    for (int t = 0; t < tokens; t++, value += stride) {
        for (int i = 0; i < count / WIDTH; i++) {
            vec part = load(value + i * WIDTH);
            a[i] += w0[t] * part;
            b[i] += w1[t] * part;
        }
    }
}

/* o[m] += extra[m] + sum over t of w[m, t] * value[t], over `count` <= GROUP dimensions. */
static void add_weighted(int queries, const float *w, const float *values, int64_t stride,
                         int tokens, int count, const float *extra, float *o, int64_t o_stride) {
    for (int first = 0; first < queries; first += 2) {
        int second = first + (first + 1 < queries);
        const float *w0 = w + first * TILE, *w1 = w + second * TILE;
        float *o0 = o + first * o_stride, *o1 = o + second * o_stride;
        for (int at = 0, vectors; at < count; at += vectors * WIDTH) {
            vec a[TOGETHER] = {}, b[TOGETHER] = {};
            int left = (count - at) / WIDTH;
            vectors = left < TOGETHER ? left : TOGETHER;
            switch (vectors) {
            case 1: weigh(w0, w1, values + at, stride, tokens, WIDTH, a, b); break;
            case 2: weigh(w0, w1, values + at, stride, tokens, 2 * WIDTH, a, b); break;
            case 3: weigh(w0, w1, values + at, stride, tokens, 3 * WIDTH, a, b); break;
            default: weigh(w0, w1, values + at, stride, tokens, TOGETHER * WIDTH, a, b);
            }
            for (int i = 0; i < vectors; i++) {
                int to = at + i * WIDTH;
                store(o0 + to, load(o0 + to) + a[i] + extra[first]);
                if (second != first) store(o1 + to, load(o1 + to) + b[i] + extra[second]);
            }
        }
    }
}

/* Turns the scores of one query in a tile into weights relative to its largest score so far, `top`. If
 * that grows, scales the sum of the earlier weights, `total`, and that of their values, `o`, down. */
static void to_weights(float *scores, int tokens, float *top, float *total, float *o, int value_d) {
    for (int t = tokens; t % WIDTH; t++) scores[t] = NO_SCORE;
    vec largest = load(scores);
    for (int t = WIDTH; t < tokens; t += WIDTH) largest = larger(load(scores + t), largest);
    float best = *top;
    for (int i = 0; i < WIDTH; i++) best = largest[i] > best ? largest[i] : best;
    if (best > *top) {
        if (*total > 0) {
            vec factor = exponential(splat(*top - best));
            *total *= factor[0];
            for (int i = 0; i < value_d; i += WIDTH) store(o + i, load(o + i) * factor);
        }
        *top = best;
    }
    vec added = {};
    for (int t = 0; t < tokens; t += WIDTH) {
        vec x = load(scores + t);
        vec weight = choose(x < splat(-1.0e38f), (vec){}, exponential(x - best));
        store(scores + t, weight);
        added += weight + x * 0.0f; /* NaN if a score is NaN or infinite: the logits must show it */
    }
    *total += sum(added);
}

/* Computes the partials of a task: for each tile of tokens, scores, then weights, then sums of values. */
static void run_task(const Job *job, const Task *task) {
    const AttentionCall *call = job->call;
    const Run *run = &call->runs[task->run];
    int repeats = call->heads / call->kv_heads, queries = task->rows * repeats;
    int key_d = call->key_d, value_d = call->value_d;
    int key_bits = run->key_bits, value_bits = run->value_bits, is_quantized = key_bits < 32;
    int64_t key_row = (int64_t)key_d * key_bits / 8, value_row = (int64_t)value_d * value_bits / 8;
    int key_group = group_of(key_d), value_group = group_of(value_d);
    int key_groups = key_d / key_group, value_groups = value_d / value_group;
    int most_groups = key_groups > value_groups ? key_groups : value_groups;
    int64_t head_tokens = task->kv_head * run->capacity;
    const uint8_t *keys = run->keys + head_tokens * key_row;
    const uint8_t *values = run->values + head_tokens * value_row;
    const _Float16 *key_scales = run->key_scales, *key_biases = run->key_biases;
    const _Float16 *value_scales = run->value_scales, *value_biases = run->value_biases;
    const float *q[MOST_QUERIES], *group_q[MOST_QUERIES];
    float scores[MOST_QUERIES * TILE] __attribute__((aligned(64)));
    float extra[MOST_QUERIES] = {};
    float weights[is_quantized ? queries * TILE : 1] __attribute__((aligned(64)));
    float tile[is_quantized ? TILE * GROUP : 1] __attribute__((aligned(64)));
    float q_sums[is_quantized ? key_groups * queries : 1];
    float scales[is_quantized ? TILE * most_groups : 1];
    float biases[is_quantized ? TILE * most_groups : 1];
    float permuted[key_bits == 4 ? queries * key_d : 1] __attribute__((aligned(64)));
    float scale[TILE], bias[TILE];
    for (int row = 0; row < task->rows; row++) {
        int64_t id = call->row_ids[task->first_row + row];
        int64_t head = id * call->heads + (int64_t)task->kv_head * repeats;
        for (int r = 0; r < repeats; r++) q[row * repeats + r] = call->queries + (head + r) * key_d;
    }
    for (int g = 0; is_quantized && g < key_groups; g++) {
        for (int m = 0; m < queries; m++) {
            vec total = {};
            for (int i = 0; i < key_group; i += WIDTH) total += load(q[m] + g * key_group + i);
            q_sums[g * queries + m] = sum(total);
        }
    }
    for (int m = 0; key_bits == 4 && m < queries; m++) {
        permute(q[m], permuted + m * key_d, key_d, key_group);
        q[m] = permuted + m * key_d;
    }
    float *o = job->o + task->first_partial * value_d;
    float *top = job->m + task->first_partial, *total = job->l + task->first_partial;
    memset(o, 0, sizeof(float) * queries * value_d);
    for (int m = 0; m < queries; m++) {
        top[m] = NO_SCORE;
        total[m] = 0;
    }
    for (int64_t t0 = task->start; t0 < task->end; t0 += TILE) {
        int tokens = task->end - t0 < TILE ? (int)(task->end - t0) : TILE;
        if (is_quantized) {
            int64_t at = (head_tokens + t0) * key_groups;
            widen(key_scales + at, scales, tokens * key_groups);
            widen(key_biases + at, biases, tokens * key_groups);
            for (int g = 0; g < key_groups; g++) {
                const uint8_t *codes = keys + t0 * key_row + g * key_group * key_bits / 8;
                unpack(codes, key_row, tokens, key_bits, key_group, tile);
                for (int t = 0; t < tokens; t++) {
                    scale[t] = scales[t * key_groups + g];
                    bias[t] = biases[t * key_groups + g];
                }
                for (int m = 0; m < queries; m++) group_q[m] = q[m] + g * key_group;
                score(queries, group_q, tile, key_group, tokens, key_group, q_sums + g * queries,
                      scale, bias, scores, g == 0);
            }
        } else {
            const float *first = (const float *)keys + t0 * key_d;
            score(queries, q, first, key_d, tokens, key_d, NULL, NULL, NULL, scores, 1);
        }
        for (int m = 0; m < queries; m++) {
            to_weights(scores + m * TILE, tokens, top + m, total + m, o + m * value_d, value_d);
        }
        if (is_quantized) {
            int64_t at = (head_tokens + t0) * value_groups;
            widen(value_scales + at, scales, tokens * value_groups);
            widen(value_biases + at, biases, tokens * value_groups);
        }
        for (int d0 = 0; !is_quantized && d0 < value_d; d0 += GROUP) {
            int count = value_d - d0 < GROUP ? value_d - d0 : GROUP;
            const float *first = (const float *)values + t0 * value_d + d0;
            add_weighted(queries, scores, first, value_d, tokens, count, extra, o + d0, value_d);
        }
        for (int g = 0; is_quantized && g < value_groups; g++) {
            const uint8_t *codes = values + t0 * value_row + g * value_group * value_bits / 8;
            unpack(codes, value_row, tokens, value_bits, value_group, tile);
            for (int t = 0; t < tokens; t++) {
                scale[t] = scales[t * value_groups + g];
                bias[t] = biases[t * value_groups + g];
            }
            for (int m = 0; m < queries; m++) {
                float added = 0;
                for (int t = 0; t < tokens; t++) {
                    weights[m * TILE + t] = scores[m * TILE + t] * scale[t];
                    added += scores[m * TILE + t] * bias[t];
                }
                extra[m] = added;
            }
            add_weighted(queries, weights, tile, value_group, tokens, value_group, extra,
                         o + g * value_group, value_d);
        }
    }
    for (int m = 0; value_bits == 4 && m < queries; m++) {
        undo_permute(o + m * value_d, value_d, value_group);
    }
}

static void run_part(void *job, int task) { run_task(job, &((Job *)job)->tasks[task]); }

/* Merges the partials of all tasks into `call->out`. top, total: memory for [rows, heads] each. */
static void merge(const Job *job, float *top, float *total) {
    const AttentionCall *call = job->call;
    int repeats = call->heads / call->kv_heads, value_d = call->value_d;
    int64_t places = (int64_t)call->rows * call->heads;
    for (int64_t at = 0; at < places; at++) {
        top[at] = call->sinks ? call->sinks[at % call->heads] : NO_SCORE;
        total[at] = call->sinks ? 1 : 0;
    }
    memset(call->out, 0, sizeof(float) * places * value_d);
    for (int k = 0; k < job->task_count; k++) {
        const Task *task = &job->tasks[k];
        for (int m = 0; m < task->rows * repeats; m++) {
            int64_t id = call->row_ids[task->first_row + m / repeats];
            int64_t at = id * call->heads + (int64_t)task->kv_head * repeats + m % repeats;
            int64_t partial = task->first_partial + m;
            float best = job->m[partial] > top[at] ? job->m[partial] : top[at];
            float before = exponential(splat(top[at] - best))[0];
            float added = exponential(splat(job->m[partial] - best))[0];
            const float *from = job->o + partial * value_d;
            float *to = call->out + at * value_d;
            for (int i = 0; i < value_d; i += WIDTH) {
                store(to + i, load(to + i) * before + load(from + i) * added);
            }
            total[at] = total[at] * before + job->l[partial] * added;
            top[at] = best;
        }
    }
    for (int64_t at = 0; at < places; at++) {
        float *to = call->out + at * value_d;
        for (int i = 0; i < value_d; i += WIDTH) store(to + i, load(to + i) / total[at]);
    }
}

/* Divides the call into tasks, and writes them if `tasks` is not NULL. Returns their number; *partials is
 * the number of partials. */
static int plan(const AttentionCall *call, Task *tasks, int64_t *partials) {
    int repeats = call->heads / call->kv_heads, count = 0;
    int most_rows = MOST_QUERIES / repeats;
    *partials = 0;
    for (int r = 0; r < call->run_count; r++) {
        const Run *run = &call->runs[r];
        for (int head = 0; head < call->kv_heads; head++) {
            for (int start = 0; start < run->tokens; start += call->chunk_tokens) {
                int left = run->tokens - start;
                int end = start + (left < call->chunk_tokens ? left : call->chunk_tokens);
                for (int row = 0; row < run->rows; row += most_rows) {
                    int rows = run->rows - row < most_rows ? run->rows - row : most_rows;
                    if (tasks) {
                        tasks[count] = (Task){r, head, start, end, run->first_row + row, rows,
                                              *partials};
                    }
                    *partials += (int64_t)rows * repeats;
                    count++;
                }
            }
        }
    }
    return count;
}

static int can_unpack(int bits) { return bits == 8 || bits == 5 || bits == 4; }

/* out[t, i] = scales[t] * code[t, i] + biases[t] for one group of dimensions. tile: the codes as
 * floats, [tokens, group], as `unpack` returns them. stride: floats from one token to the next. */
static inline __attribute__((always_inline)) void scale_codes(
    const float *tile, const float *scales, const float *biases, int scale_stride, int tokens,
    int is_halved, int group, float *restrict out, int64_t stride) {
    for (int t = 0; t < tokens; t++, tile += group, out += stride) {
        float scale = scales[t * scale_stride], bias = biases[t * scale_stride];
        if (is_halved) { /* the even dimensions first, then the odd ones */
            for (int i = 0; i < group / 2; i++) {
                out[2 * i] = scale * tile[i] + bias;
                out[2 * i + 1] = scale * tile[group / 2 + i] + bias;
            }
        } else {
            for (int i = 0; i < group; i++) out[i] = scale * tile[i] + bias;
        }
    }
}

/* Converts codes to float32, [heads, tokens, dimension]. The pointers are those of the first token
 * of the first head; capacity, out_capacity: tokens from one head to the next. Returns 0, or 2 if
 * the dimension or the bits are not supported. */
int dequantize(const uint8_t *codes, const _Float16 *scales, const _Float16 *biases, float *out,
               int64_t capacity, int64_t out_capacity, int heads, int tokens, int dimension,
               int bits) {
    if (!can_unpack(bits) || dimension % (GROUP / 2) || dimension > MOST_D) return 2;
    int group = group_of(dimension), groups = dimension / group;
    int64_t row = (int64_t)dimension * bits / 8;
    float tile[TILE * GROUP] __attribute__((aligned(64)));
    float tile_scales[TILE * groups], tile_biases[TILE * groups];
    for (int head = 0; head < heads; head++) {
        for (int t0 = 0; t0 < tokens; t0 += TILE) {
            int count = tokens - t0 < TILE ? tokens - t0 : TILE;
            int64_t at = head * capacity + t0;
            widen(scales + at * groups, tile_scales, count * groups);
            widen(biases + at * groups, tile_biases, count * groups);
            for (int g = 0; g < groups; g++) {
                unpack(codes + at * row + g * group * bits / 8, row, count, bits, group, tile);
                float *to = out + (head * out_capacity + t0) * dimension + g * group;
                const float *scale = tile_scales + g, *bias = tile_biases + g;
                if (group == GROUP && bits != 4) { /* a constant number of steps */
                    scale_codes(tile, scale, bias, groups, count, 0, GROUP, to, dimension);
                } else if (group == GROUP) {
                    scale_codes(tile, scale, bias, groups, count, 1, GROUP, to, dimension);
                } else {
                    scale_codes(tile, scale, bias, groups, count, bits == 4, GROUP / 2, to,
                                dimension);
                }
            }
        }
    }
    return 0;
}

/* Returns 0, 1 if memory is short, or 2 if the shapes or bits are not supported: dimensions must be
 * multiples of 16, and of 32 up to 640 if a run is quantized; keys and values of a run must both be
 * quantized or both not; at most 64 heads may share a key head. */
int decode_attention(const AttentionCall *call) {
    if (call->key_d % DIMENSION_UNIT || call->value_d % DIMENSION_UNIT ||
        call->heads % call->kv_heads ||
        call->heads / call->kv_heads > MOST_QUERIES || call->chunk_tokens < 1) {
        return 2;
    }
    for (int r = 0; r < call->run_count; r++) {
        int most = call->key_d > call->value_d ? call->key_d : call->value_d;
        int key_bits = call->runs[r].key_bits, value_bits = call->runs[r].value_bits;
        if (key_bits == 32 && value_bits == 32) continue;
        if (!can_unpack(key_bits) || !can_unpack(value_bits)) return 2;
        if (call->key_d % (GROUP / 2) || call->value_d % (GROUP / 2) || most > MOST_D) return 2;
    }
    int64_t partials;
    int count = plan(call, NULL, &partials);
    int64_t places = (int64_t)call->rows * call->heads;
    Job job = {.call = call, .task_count = count};
    job.tasks = malloc(sizeof(Task) * (count + 1));
    job.o = malloc(sizeof(float) * (partials * (call->value_d + 2) + 2 * places + 1));
    if (!job.tasks || !job.o) {
        free(job.tasks);
        free(job.o);
        return 1;
    }
    job.m = job.o + partials * call->value_d;
    job.l = job.m + partials;
    plan(call, job.tasks, &partials);
    (call->share_out ? call->share_out : share_out)(run_part, &job, count, call->threads);
    merge(&job, job.l + partials, job.l + partials + places);
    free(job.tasks);
    free(job.o);
    return 0;
}
