/* Decode step kernels for a CPU in float32: skinny GEMM, RMSNorm, SwiGLU, RoPE and paged attention. Compiled where they
   run and called by `kernels/cpu.py`.

   A decode step of a few dozen rows is bound by the time to read the weights, each of which is used once. General matrix
   libraries are made for many rows and do not reach that bound. Everything here is written for few rows, with vectors as
   wide as the machine's. The order of every summation is independent of the number of rows, and so are the results
   (batch-invariant). */

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__FMA__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
enum { LANES = 16, TILE_ROWS = 6 }; /* floats in a vector; rows of a tile, whose sums must fit into the registers */
#elif defined(__AVX2__)
enum { LANES = 8, TILE_ROWS = 2 };
#else
enum { LANES = 4, TILE_ROWS = 6 };
#endif
enum { TILE_COLUMNS = 4, PREFETCH = 4 }; /* columns of a tile; columns whose weights are prefetched */
enum { BLOCK = 16, MOST_DIM = 256, HEADS_AT_ONCE = 4 }; /* keys at once, a multiple of LANES; largest head dimension */

#define NO_SCORE -1e30f /* below every score */

typedef float vector __attribute__((vector_size(LANES * 4), aligned(4)));
typedef float four __attribute__((vector_size(16), aligned(4)));
typedef int32_t integers __attribute__((vector_size(LANES * 4), aligned(4)));

static inline vector load(const float *from) { return *(const vector *)from; }

/* Fused multiply-add everywhere: a compiler would fuse `sum += a * b` in one tile and not in another, and results would
   round differently. */
static inline vector multiply_add(vector sum, vector a, vector b) {
#if defined(__AVX512F__)
    return (vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__AVX2__) && defined(__FMA__)
    return (vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
    return sum + a * b;
#endif
}

/* The elements after the last whole vector. Not inlined, for the same reason. */
static __attribute__((noinline)) float add_rest(float sum, const float *a, const float *b, long count) {
    for (long i = 0; i < count; i++) sum += a[i] * b[i];
    return sum;
}

static inline float horizontal_sum(vector values) {
    four parts[LANES / 4];
    memcpy(parts, &values, sizeof parts);
    four sum = parts[0];
    for (int i = 1; i < LANES / 4; i++) sum += parts[i];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

static inline float dot(const float *a, const float *b, long count) {
    vector sums = {0};
    long i = 0;
    for (; i + LANES <= count; i += LANES) sums = multiply_add(sums, load(a + i), load(b + i));
    return add_rest(horizontal_sum(sums), a + i, b + i, count - i);
}

static inline vector choose(integers which, vector yes, vector no) {
    return (vector)(((integers)yes & which) | ((integers)no & ~which));
}

/* e^x; relative error 2e-7. Range reduction: x = n ln 2 + r, and a polynomial for e^r. */
static inline vector exp_vector(vector x) {
    vector least = -87.f + (vector){0}, most = 88.f + (vector){0};
    x = choose(x < least, least, choose(x > most, most, x));
    integers whole = __builtin_convertvector(x * 1.44269504f + 126.5f, integers) - 126; /* rounds */
    vector times = __builtin_convertvector(whole, vector);
    vector rest = x - times * 0.693359375f + times * 2.12194440e-4f;
    vector sum = rest * (1.f / 5040) + 1.f / 720;
    sum = sum * rest + 1.f / 120;
    sum = sum * rest + 1.f / 24;
    sum = sum * rest + 1.f / 6;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1.f;
    sum = sum * rest + 1.f;
    return sum * (vector)((whole + 127) << 23);
}

/* ------------------------------------------------------------------------------------------------------- products */

struct product {
    const float *x, *weight, *bias; /* [rows, in], [out, in], [out] or null */
    float *y;                       /* [rows, out] */
    long rows, in, out;
    int add; /* to y, instead of overwriting it */
};

/* A tile of ROWS x COLUMNS dot products of y. The weights of the next tile are prefetched. */
#define TILE(ROWS, COLUMNS)                                                                                      \
    static void tile_##ROWS##_##COLUMNS(const struct product *p, long row, long column) {                        \
        const float *x = p->x + row * p->in, *weight = p->weight + column * p->in;                               \
        vector sums[ROWS][COLUMNS];                                                                              \
        for (int r = 0; r < ROWS; r++)                                                                           \
            for (int c = 0; c < COLUMNS; c++) sums[r][c] = (vector){0};                                          \
        long i = 0;                                                                                              \
        for (; i + LANES <= p->in; i += LANES) {                                                                 \
            vector weights[COLUMNS];                                                                             \
            for (int c = 0; c < COLUMNS; c++) {                                                                  \
                weights[c] = load(weight + c * p->in + i);                                                       \
                __builtin_prefetch(weight + (c + PREFETCH) * p->in + i);                                         \
            }                                                                                                    \
            for (int r = 0; r < ROWS; r++) {                                                                     \
                vector input = load(x + r * p->in + i);                                                          \
                for (int c = 0; c < COLUMNS; c++) sums[r][c] = multiply_add(sums[r][c], input, weights[c]);      \
            }                                                                                                    \
        }                                                                                                        \
        for (int r = 0; r < ROWS; r++)                                                                           \
            for (int c = 0; c < COLUMNS; c++) {                                                                  \
                float sum = horizontal_sum(sums[r][c]) + (p->bias ? p->bias[column + c] : 0);                    \
                if (i < p->in) sum = add_rest(sum, x + r * p->in + i, weight + c * p->in + i, p->in - i);        \
                float *y = p->y + (row + r) * p->out + column + c;                                               \
                *y = p->add ? *y + sum : sum;                                                                    \
            }                                                                                                    \
    }

TILE(1, 1) TILE(2, 1) TILE(1, 4) TILE(2, 4)
#if !defined(__AVX2__) || defined(__AVX512F__)
TILE(3, 1) TILE(4, 1) TILE(5, 1) TILE(6, 1) TILE(3, 4) TILE(4, 4) TILE(5, 4) TILE(6, 4)
#endif

typedef void (*tile)(const struct product *, long, long);
#if defined(__AVX2__) && !defined(__AVX512F__)
static const tile single_tiles[] = {0, tile_1_1, tile_2_1};
static const tile wide_tiles[] = {0, tile_1_4, tile_2_4};
#else
static const tile single_tiles[] = {0, tile_1_1, tile_2_1, tile_3_1, tile_4_1, tile_5_1, tile_6_1};
static const tile wide_tiles[] = {0, tile_1_4, tile_2_4, tile_3_4, tile_4_4, tile_5_4, tile_6_4};
#endif

static void columns(const struct product *p, long column, const tile *tiles) {
    long count = (p->rows + TILE_ROWS - 1) / TILE_ROWS, row = 0;
    for (long at = 0; at < count; at++) {
        long height = p->rows / count + (at < p->rows % count);
        tiles[height](p, row, column);
        row += height;
    }
}

void product(const float *x, const float *weight, const float *bias, float *y, long rows, long in, long out, int add) {
    struct product p = {x, weight, bias, y, rows, in, out, add};
#pragma omp parallel
    {
#pragma omp for schedule(static) nowait
        for (long at = 0; at < out / TILE_COLUMNS; at++) columns(&p, at * TILE_COLUMNS, wide_tiles);
#pragma omp for schedule(static)
        for (long column = out / TILE_COLUMNS * TILE_COLUMNS; column < out; column++) columns(&p, column, single_tiles);
    }
}

/* ------------------------------------------------------------------------------------------------ between products */

/* RMSNorm of one row. */
static void rms_norm(const float *x, const float *weight, float *y, long width, float eps) {
    float scale = 1.f / sqrtf(dot(x, x, width) / width + eps);
    for (long i = 0; i < width; i++) y[i] = x[i] * scale * weight[i];
}

void norm(const float *x, const float *weight, float *y, long rows, long width, float eps) {
#pragma omp parallel for if (rows > 8)
    for (long row = 0; row < rows; row++) rms_norm(x + row * width, weight, y + row * width, width, eps);
}

static inline vector swiglu(vector gates, vector values) { return gates / (1.f + exp_vector(-gates)) * values; }

/* SwiGLU. x: [rows, 2 * width], gate and up; y = silu(gate) * up. */
void gate(const float *x, float *y, long rows, long width) {
#pragma omp parallel for if (rows > 1)
    for (long row = 0; row < rows; row++) {
        const float *gates = x + row * 2 * width, *values = gates + width;
        long i = 0;
        for (; i + LANES <= width; i += LANES)
            *(vector *)(y + row * width + i) = swiglu(load(gates + i), load(values + i));
        for (; i < width; i++) y[row * width + i] = swiglu(gates[i] + (vector){0}, values[i] + (vector){0})[0];
    }
}

/* ------------------------------------------------------------------------------------------------------ attention */

struct layer {
    long queries, keys, dim; /* query heads, KV heads, head dimension */
    long slots, window;      /* tokens of a block; sliding window, 0: none */
    float scale, eps;
    const float *query_norm, *key_norm; /* or null */
    float *key_pool, *value_pool;       /* [blocks, keys, slots, dim] */
};

/* Rotary position embedding (RoPE) of one head. */
static void rope(float *head, const float *cosines, const float *sines, long dim) {
    long half = dim / 2;
    for (long i = 0; i < half; i++) {
        float one = head[i], other = head[half + i];
        head[i] = one * cosines[i] - other * sines[i];
        head[half + i] = other * cosines[half + i] + one * sines[half + i];
    }
}

/* RoPE, after QK norm if there is one, for the queries and keys of one token; its key and value go into the KV pool. */
static void rope_and_store(const struct layer *l, float *qkv, const float *cosines, const float *sines, long block,
                           long slot) {
    for (long head = 0; head < l->queries + l->keys; head++) {
        const float *weight = head < l->queries ? l->query_norm : l->key_norm;
        if (weight) rms_norm(qkv + head * l->dim, weight, qkv + head * l->dim, l->dim, l->eps);
        rope(qkv + head * l->dim, cosines, sines, l->dim);
    }
    const float *keys = qkv + l->queries * l->dim, *values = keys + l->keys * l->dim;
    for (long head = 0; head < l->keys; head++) {
        long at = ((block * l->keys + head) * l->slots + slot) * l->dim;
        memcpy(l->key_pool + at, keys + head * l->dim, l->dim * sizeof(float));
        memcpy(l->value_pool + at, values + head * l->dim, l->dim * sizeof(float));
    }
}

/* Online softmax of one query head: the sums are rescaled whenever the maximum grows. */
struct online_softmax {
    float sums[MOST_DIM], running_max, total;
};

/* Add `count` keys and values, at most BLOCK, which are contiguous in memory. */
static void attend_keys(struct online_softmax *f, const float *query, const float *keys, const float *values, long count,
                        long dim, float scale) {
    float scores[BLOCK], peak = f->running_max;
    for (long k = 0; k < BLOCK; k++) scores[k] = k < count ? dot(query, keys + k * dim, dim) * scale : NO_SCORE;
    for (long k = 0; k < BLOCK; k++) peak = scores[k] > peak ? scores[k] : peak;
    float correction = exp_vector(f->running_max - peak + (vector){0})[0];
    f->running_max = peak;
    f->total *= correction;
    for (long k = 0; k < BLOCK; k += LANES) {
        vector powers = exp_vector(load(scores + k) - peak);
        for (long i = 0; i < LANES; i++) scores[k + i] = k + i < count ? powers[i] : 0;
        f->total += horizontal_sum(load(scores + k));
    }
    long d = 0;
    for (; d + LANES <= dim; d += LANES) {
        vector sum = load(f->sums + d) * correction;
        for (long k = 0; k < count; k++) sum = multiply_add(sum, scores[k] + (vector){0}, load(values + k * dim + d));
        *(vector *)(f->sums + d) = sum;
    }
    for (; d < dim; d++) {
        f->sums[d] *= correction;
        for (long k = 0; k < count; k++) f->sums[d] += scores[k] * values[k * dim + d];
    }
}

/* Attention of query heads of one token that share a KV head (GQA), over positions `first` to `last` of its sequence. */
static void attend_heads(const struct layer *l, const float *query, long heads, long key_head, const int64_t *blocks,
                         long first, long last, float *out) {
    struct online_softmax states[HEADS_AT_ONCE];
    for (long h = 0; h < heads; h++) {
        memset(states[h].sums, 0, l->dim * sizeof(float));
        states[h].running_max = NO_SCORE;
        states[h].total = 0;
    }
    for (long position = first; position <= last;) {
        long slot = position % l->slots, count = l->slots - slot;
        if (count > BLOCK) count = BLOCK;
        if (count > last + 1 - position) count = last + 1 - position;
        long at = ((blocks[position / l->slots] * l->keys + key_head) * l->slots + slot) * l->dim;
        for (long h = 0; h < heads; h++)
            attend_keys(&states[h], query + h * l->dim, l->key_pool + at, l->value_pool + at, count, l->dim, l->scale);
        position += count;
    }
    for (long h = 0; h < heads; h++)
        for (long d = 0; d < l->dim; d++) out[h * l->dim + d] = states[h].sums[d] / states[h].total;
}

/* Apply RoPE to the first `stored` tokens and store them; compute attention for the first `queried` of those.
   `positions`: of every token in its sequence; `tables`: [tokens, widest], the block table of every token's sequence. */
void attend(const struct layer *l, float *qkv, const float *cosines, const float *sines, const int64_t *positions,
            const int64_t *tables, long widest, long stored, long queried, float *out) {
    long stride = (l->queries + 2 * l->keys) * l->dim, group = l->queries / l->keys;
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (long token = 0; token < stored; token++) {
            long position = positions[token], block = tables[token * widest + position / l->slots];
            const float *cosine = cosines + position * l->dim, *sine = sines + position * l->dim;
            rope_and_store(l, qkv + token * stride, cosine, sine, block, position % l->slots);
        }
#pragma omp for schedule(dynamic, 4)
        for (long at = 0; at < queried * l->keys; at++) {
            long token = at / l->keys, head = at % l->keys, last = positions[token];
            long first = l->window && last + 1 > l->window ? last + 1 - l->window : 0;
            for (long from = 0; from < group; from += HEADS_AT_ONCE) {
                long query = head * group + from, heads = group - from < HEADS_AT_ONCE ? group - from : HEADS_AT_ONCE;
                attend_heads(l, qkv + token * stride + query * l->dim, heads, head, tables + token * widest, first,
                             last, out + (token * l->queries + query) * l->dim);
            }
        }
    }
}
