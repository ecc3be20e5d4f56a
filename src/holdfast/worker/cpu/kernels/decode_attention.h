/* What an attention call gets: decode_attention.c. */
#ifndef DECODE_ATTENTION_H
#define DECODE_ATTENTION_H
#include <stdint.h>

/* Adjoining tokens of one layer, and the rows that hold them. */
typedef struct {
    const uint8_t *keys, *values; /* the first token of the first key head */
    const void *key_scales, *key_biases, *value_scales, *value_biases; /* NULL if float32 */
    int64_t capacity;             /* tokens from one head to the next */
    int32_t tokens;
    int32_t key_bits, value_bits; /* 8, 5 or 4 each, or both 32 */
    int32_t first_row, rows;      /* the rows are row_ids[first_row : first_row + rows] */
} Run;

typedef struct {
    const float *queries; /* scaled, [rows, heads, key_d] */
    float *out;           /* [rows, heads, value_d] */
    const float *sinks;   /* [heads], or NULL: a score per head that has no value */
    const Run *runs;
    const int32_t *row_ids;
    int32_t rows, heads, kv_heads, key_d, value_d, run_count;
    int32_t chunk_tokens; /* a task computes at most this many tokens of a run */
    int32_t threads;
    void (*share_out)(void (*run)(void *, int), void *work, int parts, int threads); /* or NULL */
} AttentionCall;

#endif
