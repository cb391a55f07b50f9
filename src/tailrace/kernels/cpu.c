/* What a decode step on a CPU consists of, for float32: compiled where it runs, called by `kernels/cpu.py`.

   A step of a few dozen rows reads every weight once and does little with it, so all that counts is that weights stream
   from memory without a pause. General matrix libraries are made for many rows and stop and go here. Everything in this
   file is written for few rows; vectors are as wide as the machine's. The order in which a number is summed up does not
   depend on how many rows there are, so neither does the result. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__FMA__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
enum { WIDE = 16, TALL = 6 }; /* floats in a vector; rows of a tile: its sums must fit into the registers */
#elif defined(__AVX2__)
enum { WIDE = 8, TALL = 2 };
#else
enum { WIDE = 4, TALL = 6 };
#endif
enum { BROAD = 4, AHEAD = 4 };               /* columns of a tile; tiles whose weights are fetched in advance */
enum { BLOCK = 16, MOST_DIM = 256, TOGETHER = 4 }; /* keys seen at once, a multiple of WIDE; longest head; query heads at once */

#define LOWEST -1e30f /* below every score */

typedef float wide __attribute__((vector_size(WIDE * 4), aligned(4)));
typedef float four __attribute__((vector_size(16), aligned(4)));
typedef int32_t integers __attribute__((vector_size(WIDE * 4), aligned(4)));

static inline wide read_wide(const float *from) { return *(const wide *)from; }

/* Left to itself a compiler fuses `sum += a * b` in one tile and not in another, and then they round differently. */
static inline wide plus_product(wide sum, wide a, wide b) {
#if defined(__AVX512F__)
    return (wide)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__AVX2__) && defined(__FMA__)
    return (wide)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
    return sum + a * b;
#endif
}

/* What whole vectors have left over. Compiled once, for the same reason. */
static __attribute__((noinline)) float plus_rest(float sum, const float *a, const float *b, long count) {
    for (long i = 0; i < count; i++) sum += a[i] * b[i];
    return sum;
}

static inline float sum_of(wide values) {
    four parts[WIDE / 4];
    memcpy(parts, &values, sizeof parts);
    four sum = parts[0];
    for (int i = 1; i < WIDE / 4; i++) sum += parts[i];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

static inline float dot(const float *a, const float *b, long count) {
    wide sums = {0};
    long i = 0;
    for (; i + WIDE <= count; i += WIDE) sums = plus_product(sums, read_wide(a + i), read_wide(b + i));
    return plus_rest(sum_of(sums), a + i, b + i, count - i);
}

static inline wide choose(integers which, wide yes, wide no) {
    return (wide)(((integers)yes & which) | ((integers)no & ~which));
}

/* e^x; relative error 2e-7. x is a whole multiple of ln 2 and a rest, of whose power a polynomial is taken. */
static inline wide powers_of_e(wide x) {
    wide least = -87.f + (wide){0}, most = 88.f + (wide){0};
    x = choose(x < least, least, choose(x > most, most, x));
    integers whole = __builtin_convertvector(x * 1.44269504f + 126.5f, integers) - 126; /* cut off above zero: rounded */
    wide times = __builtin_convertvector(whole, wide);
    wide rest = x - times * 0.693359375f + times * 2.12194440e-4f;
    wide sum = rest * (1.f / 5040) + 1.f / 720;
    sum = sum * rest + 1.f / 120;
    sum = sum * rest + 1.f / 24;
    sum = sum * rest + 1.f / 6;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1.f;
    sum = sum * rest + 1.f;
    return sum * (wide)((whole + 127) << 23);
}

/* ------------------------------------------------------------------------------------------------------- products */

struct product {
    const float *x, *weight, *bias; /* [rows, in], [out, in], [out] or null */
    float *y;                       /* [rows, out] */
    long rows, in, out;
    int add; /* to what y holds */
};

/* ROWS x COLUMNS numbers of y, each a dot product. The weights of a tile some way ahead are fetched meanwhile. */
#define TILE(ROWS, COLUMNS)                                                                                      \
    static void tile_##ROWS##_##COLUMNS(const struct product *p, long row, long column) {                        \
        const float *x = p->x + row * p->in, *weight = p->weight + column * p->in;                               \
        wide sums[ROWS][COLUMNS];                                                                                \
        for (int r = 0; r < ROWS; r++)                                                                           \
            for (int c = 0; c < COLUMNS; c++) sums[r][c] = (wide){0};                                            \
        long i = 0;                                                                                              \
        for (; i + WIDE <= p->in; i += WIDE) {                                                                   \
            wide weights[COLUMNS];                                                                               \
            for (int c = 0; c < COLUMNS; c++) {                                                                  \
                weights[c] = read_wide(weight + c * p->in + i);                                                  \
                __builtin_prefetch(weight + (c + AHEAD) * p->in + i);                                            \
            }                                                                                                    \
            for (int r = 0; r < ROWS; r++) {                                                                     \
                wide input = read_wide(x + r * p->in + i);                                                       \
                for (int c = 0; c < COLUMNS; c++) sums[r][c] = plus_product(sums[r][c], input, weights[c]);      \
            }                                                                                                    \
        }                                                                                                        \
        for (int r = 0; r < ROWS; r++)                                                                           \
            for (int c = 0; c < COLUMNS; c++) {                                                                  \
                float sum = sum_of(sums[r][c]) + (p->bias ? p->bias[column + c] : 0);                            \
                if (i < p->in) sum = plus_rest(sum, x + r * p->in + i, weight + c * p->in + i, p->in - i);       \
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
static const tile narrow[] = {0, tile_1_1, tile_2_1};
static const tile broad[] = {0, tile_1_4, tile_2_4};
#else
static const tile narrow[] = {0, tile_1_1, tile_2_1, tile_3_1, tile_4_1, tile_5_1, tile_6_1};
static const tile broad[] = {0, tile_1_4, tile_2_4, tile_3_4, tile_4_4, tile_5_4, tile_6_4};
#endif

static void columns(const struct product *p, long column, const tile *tiles) {
    long count = (p->rows + TALL - 1) / TALL, row = 0;
    for (long at = 0; at < count; at++) {
        long tall = p->rows / count + (at < p->rows % count);
        tiles[tall](p, row, column);
        row += tall;
    }
}

void product(const float *x, const float *weight, const float *bias, float *y, long rows, long in, long out, int add) {
    struct product p = {x, weight, bias, y, rows, in, out, add};
#pragma omp parallel
    {
#pragma omp for schedule(static) nowait
        for (long at = 0; at < out / BROAD; at++) columns(&p, at * BROAD, broad);
#pragma omp for schedule(static)
        for (long column = out / BROAD * BROAD; column < out; column++) columns(&p, column, narrow);
    }
}

/* ------------------------------------------------------------------------------------------------ between products */

static void normed(const float *x, const float *weight, float *y, long width, float eps) {
    float scale = 1.f / sqrtf(dot(x, x, width) / width + eps);
    for (long i = 0; i < width; i++) y[i] = x[i] * scale * weight[i];
}

void norm(const float *x, const float *weight, float *y, long rows, long width, float eps) {
#pragma omp parallel for if (rows > 8)
    for (long row = 0; row < rows; row++) normed(x + row * width, weight, y + row * width, width, eps);
}

static inline wide gated(wide gates, wide values) { return gates / (1.f + powers_of_e(-gates)) * values; }

/* x: [rows, 2 * width]; y: SiLU of its first half, times its second half. */
void gate(const float *x, float *y, long rows, long width) {
#pragma omp parallel for if (rows > 1)
    for (long row = 0; row < rows; row++) {
        const float *gates = x + row * 2 * width, *values = gates + width;
        long i = 0;
        for (; i + WIDE <= width; i += WIDE)
            *(wide *)(y + row * width + i) = gated(read_wide(gates + i), read_wide(values + i));
        for (; i < width; i++) y[row * width + i] = gated(gates[i] + (wide){0}, values[i] + (wide){0})[0];
    }
}

/* ------------------------------------------------------------------------------------------------------ attention */

struct layer {
    long queries, keys, dim; /* heads of each kind, floats of a head */
    long slots, window;      /* tokens of a block; how far back a token sees, 0: to the beginning */
    float scale, eps;
    const float *query_norm, *key_norm; /* or null */
    float *key_pool, *value_pool;       /* [blocks, keys, slots, dim] */
};

static void turn(float *head, const float *cosines, const float *sines, long dim) {
    long half = dim / 2;
    for (long i = 0; i < half; i++) {
        float one = head[i], other = head[half + i];
        head[i] = one * cosines[i] - other * sines[i];
        head[half + i] = other * cosines[half + i] + one * sines[half + i];
    }
}

/* Queries and keys of one token are turned to its place; its key and value go into the pool. */
static void settle(const struct layer *l, float *qkv, const float *cosines, const float *sines, long block, long slot) {
    for (long head = 0; head < l->queries + l->keys; head++) {
        const float *weight = head < l->queries ? l->query_norm : l->key_norm;
        if (weight) normed(qkv + head * l->dim, weight, qkv + head * l->dim, l->dim, l->eps);
        turn(qkv + head * l->dim, cosines, sines, l->dim);
    }
    const float *keys = qkv + l->queries * l->dim, *values = keys + l->keys * l->dim;
    for (long head = 0; head < l->keys; head++) {
        long at = ((block * l->keys + head) * l->slots + slot) * l->dim;
        memcpy(l->key_pool + at, keys + head * l->dim, l->dim * sizeof(float));
        memcpy(l->value_pool + at, values + head * l->dim, l->dim * sizeof(float));
    }
}

/* What one query head has found so far: a softmax that is corrected whenever a higher score turns up. */
struct finding {
    float sums[MOST_DIM], highest, total;
};

/* `count` more keys and values, at most BLOCK, which follow each other in memory. */
static void see(struct finding *f, const float *query, const float *keys, const float *values, long count, long dim,
                float scale) {
    float scores[BLOCK], peak = f->highest;
    for (long k = 0; k < BLOCK; k++) scores[k] = k < count ? dot(query, keys + k * dim, dim) * scale : LOWEST;
    for (long k = 0; k < BLOCK; k++) peak = scores[k] > peak ? scores[k] : peak;
    float correction = powers_of_e(f->highest - peak + (wide){0})[0];
    f->highest = peak;
    f->total *= correction;
    for (long k = 0; k < BLOCK; k += WIDE) {
        wide powers = powers_of_e(read_wide(scores + k) - peak);
        for (long i = 0; i < WIDE; i++) scores[k + i] = k + i < count ? powers[i] : 0;
        f->total += sum_of(read_wide(scores + k));
    }
    long d = 0;
    for (; d + WIDE <= dim; d += WIDE) {
        wide sum = read_wide(f->sums + d) * correction;
        for (long k = 0; k < count; k++) sum = plus_product(sum, scores[k] + (wide){0}, read_wide(values + k * dim + d));
        *(wide *)(f->sums + d) = sum;
    }
    for (; d < dim; d++) {
        f->sums[d] *= correction;
        for (long k = 0; k < count; k++) f->sums[d] += scores[k] * values[k * dim + d];
    }
}

/* The query heads of one token that share a key head, against the places from `first` to `last` of their sequence. */
static void look(const struct layer *l, const float *query, long heads, long key_head, const int64_t *blocks, long first,
                 long last, float *out) {
    struct finding found[TOGETHER];
    for (long h = 0; h < heads; h++) {
        memset(found[h].sums, 0, l->dim * sizeof(float));
        found[h].highest = LOWEST;
        found[h].total = 0;
    }
    for (long place = first; place <= last;) {
        long slot = place % l->slots, count = l->slots - slot;
        if (count > BLOCK) count = BLOCK;
        if (count > last + 1 - place) count = last + 1 - place;
        long at = ((blocks[place / l->slots] * l->keys + key_head) * l->slots + slot) * l->dim;
        for (long h = 0; h < heads; h++)
            see(&found[h], query + h * l->dim, l->key_pool + at, l->value_pool + at, count, l->dim, l->scale);
        place += count;
    }
    for (long h = 0; h < heads; h++)
        for (long d = 0; d < l->dim; d++) out[h * l->dim + d] = found[h].sums[d] / found[h].total;
}

/* The first `settled` tokens are turned and stored, the first `seen` of them look around. `places`: of every token in its
   sequence; `tables`: [tokens, widest], the blocks of every token's sequence. */
void attend(const struct layer *l, float *qkv, const float *cosines, const float *sines, const int64_t *places,
            const int64_t *tables, long widest, long settled, long seen, float *out) {
    long stride = (l->queries + 2 * l->keys) * l->dim, group = l->queries / l->keys;
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (long token = 0; token < settled; token++) {
            long place = places[token], block = tables[token * widest + place / l->slots];
            settle(l, qkv + token * stride, cosines + place * l->dim, sines + place * l->dim, block, place % l->slots);
        }
#pragma omp for schedule(dynamic, 4)
        for (long at = 0; at < seen * l->keys; at++) {
            long token = at / l->keys, head = at % l->keys, last = places[token];
            long first = l->window && last + 1 > l->window ? last + 1 - l->window : 0;
            for (long from = 0; from < group; from += TOGETHER) {
                long query = head * group + from, heads = group - from < TOGETHER ? group - from : TOGETHER;
                look(l, qkv + token * stride + query * l->dim, heads, head, tables + token * widest, first, last,
                     out + (token * l->queries + query) * l->dim);
            }
        }
    }
}
