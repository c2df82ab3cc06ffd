// Attention over a paged float32 KV cache for a ragged batch of decodes and prompt chunks, on a CPU.
//
// A program is a tile of queries of one sequence and one KV head; it reads keys and values where they lie in the
// pool, a token's after the other's, and folds them into a running softmax. What a query gets does not depend on
// who else is in the batch, nor on the number of threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

// Few keys, since those of a tile lie apart by a power of two, and share few places of the processor's cache.
constexpr int TILE_KEYS = 16;
constexpr int TILE_ROWS = 8;
constexpr float INF = std::numeric_limits<float>::infinity();

// exp(x) for x <= 0 in a form that compilers turn into vector instructions; about 1e-7 relative. Below -87 it is 0.
inline float exponential(float x) {
    const float clamped = x < -87.0f ? -87.0f : x;
    const float n = std::floor(clamped * 1.44269504f + 0.5f);
    const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : p * power;
}

struct Call {
    const float *q, *k, *v, *sinks;
    float *out, *kv;
    // num_seqs, table_width, then for each sequence: its first token, tokens, start, whether they are stored;
    // then the block tables, a row for each sequence.
    const int64_t *step;
    int64_t q_token, q_head, k_token, k_head, v_token, v_head;
    int64_t num_tokens, num_heads, num_kv_heads, key_dim, value_dim, block_size, window;
    float scale, softcap;
};

struct Sequence {
    int64_t token, num_tokens, start;
    bool is_stored;
    const int64_t *table;
};

Sequence sequence(const Call &call, int64_t place) {
    const int64_t *entry = call.step + 2 + 4 * place;
    return {entry[0], entry[1], entry[2], entry[3] != 0, call.step + 2 + 4 * call.step[0] + place * call.step[1]};
}

float *slot(const Call &call, const Sequence &seq, int64_t position) {
    const int64_t index = seq.table[position / call.block_size] * call.block_size + position % call.block_size;
    return call.kv + index * call.num_kv_heads * (call.key_dim + call.value_dim);
}

void store(const Call &call, const Sequence &seq, int64_t place) {
    float *target = slot(call, seq, seq.start + place);
    for (int64_t head = 0; head < call.num_kv_heads; ++head) {
        const float *k = call.k + (seq.token + place) * call.k_token + head * call.k_head;
        const float *v = call.v + (seq.token + place) * call.v_token + head * call.v_head;
        target = std::copy(k, k + call.key_dim, target);
        target = std::copy(v, v + call.value_dim, target);
    }
}

// Attend with some queries of a sequence for KV heads `head` to `last_head`. DIM is the size of keys and values
// where it is known when this is compiled, or 0.
template <int DIM>
void attend(
    const Call &call, const Sequence &seq, int64_t head, int64_t last_head, int64_t first, int64_t num_queries) {
    const int64_t key_dim = DIM ? DIM : call.key_dim, value_dim = DIM ? DIM : call.value_dim;
    const int64_t group = call.num_heads / call.num_kv_heads, head_size = key_dim + value_dim;
    const int64_t rows = num_queries * group, all_rows = rows * (last_head - head);
    std::vector<float> q(all_rows * key_dim), acc(all_rows * value_dim, 0.0f);
    std::vector<float> top(all_rows, -INF), sum(all_rows, 0.0f);
    const auto query_head = [&](int64_t row) { return (head + row / rows) * group + row % group; };
    const auto token = [&](int64_t row) { return seq.token + first + row % rows / group; };
    for (int64_t row = 0; row < all_rows; ++row) {
        const float *source = call.q + token(row) * call.q_token + query_head(row) * call.q_head;
        for (int64_t d = 0; d < key_dim; ++d) q[row * key_dim + d] = source[d] * call.scale;
        if (call.sinks) top[row] = call.sinks[query_head(row)], sum[row] = 1.0f;
    }
    const int64_t position = seq.start + first, end = position + num_queries;
    const int64_t seen_from = call.window ? std::max<int64_t>(0, position - call.window + 1) : 0;
    // Tiles begin at multiples of their size, so that a query's sums do not depend on how a prompt was cut.
    for (int64_t begin = seen_from / TILE_KEYS * TILE_KEYS; begin < end; begin += TILE_KEYS) {
        const float *slots[TILE_KEYS];
        const int64_t low = std::max(begin, seen_from) - begin, high = std::min<int64_t>(TILE_KEYS, end - begin);
        for (int64_t j = low; j < high;) {
            // One division for each block, not for each key.
            const float *key = slot(call, seq, begin + j) + head * head_size;
            const int64_t left = call.block_size - (begin + j) % call.block_size;
            for (const int64_t stop = std::min(high, j + left); j < stop; ++j, key += call.num_kv_heads * head_size)
                slots[j] = key;
        }
        // Processors foresee reads only inside a page, so the next tile is fetched meanwhile.
        const int64_t ahead = std::min<int64_t>(end - begin - TILE_KEYS, TILE_KEYS);
        const int64_t lines = head_size * (last_head - head) / 16;
        int64_t fetched = 0;
        // All heads of a tile before the next tile: the pool is then read in the order in which it lies.
        for (int64_t row = 0; row < all_rows; ++row) {
            const int64_t at = position + row % rows / group, offset = row / rows * head_size;
            const int64_t from = call.window ? std::max(low, at - call.window + 1 - begin) : low;
            const int64_t to = std::min(high, at + 1 - begin);
            for (const int64_t stop = ahead * (row + 1) / all_rows; fetched < stop; ++fetched) {
                const float *next = slot(call, seq, begin + TILE_KEYS + fetched) + head * head_size;
                for (int64_t line = 0; line < lines; ++line) __builtin_prefetch(next + 16 * line);
            }
            if (from >= to) continue;
            float weight[TILE_KEYS];
            const float *query = &q[row * key_dim];
            float new_top = top[row];
            for (int64_t j = from; j < to; ++j) {
                const float *key = slots[j] + offset;
                float score = 0.0f;
                for (int64_t d = 0; d < key_dim; ++d) score += query[d] * key[d];
                if (call.softcap > 0.0f) score = call.softcap * std::tanh(score / call.softcap);
                weight[j] = score;
                new_top = std::max(new_top, score);
            }
            const float decay = top[row] == -INF ? 0.0f : exponential(top[row] - new_top);
            float total = 0.0f;
            for (int64_t j = from; j < to; ++j) {
                weight[j] = exponential(weight[j] - new_top);
                total += weight[j];
            }
            sum[row] = sum[row] * decay + total;
            top[row] = new_top;
            // In a local array of fixed size, sums stay in registers.
            float local[DIM ? DIM : 1];
            float *sums = DIM ? local : &acc[row * value_dim];
            if (DIM) std::copy_n(&acc[row * value_dim], value_dim, local);
            for (int64_t d = 0; d < value_dim; ++d) sums[d] *= decay;
            for (int64_t j = from; j < to; ++j) {
                const float *value = slots[j] + offset + key_dim;
                for (int64_t d = 0; d < value_dim; ++d) sums[d] += weight[j] * value[d];
            }
            if (DIM) std::copy_n(local, value_dim, &acc[row * value_dim]);
        }
    }
    for (int64_t row = 0; row < all_rows; ++row) {
        float *target = call.out + (token(row) * call.num_heads + query_head(row)) * value_dim;
        for (int64_t d = 0; d < value_dim; ++d) target[d] = acc[row * value_dim + d] / sum[row];
    }
}

// What one tile of a matrix product holds in registers: rows times two vectors.
#ifdef __AVX512F__
constexpr int LANES = 16, PRODUCT_ROWS = 8;
#else
constexpr int LANES = 8, PRODUCT_ROWS = 6;
#endif
constexpr int PANEL = 2 * LANES;
typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));

struct Product {
    const float *x, *panels, *bias;
    float *out;
    int64_t x_row, num_rows, num_inputs, num_outputs;
};

// A row's sums run over the inputs in one order, whatever other rows there are.
template <int ROWS>
void multiply(const Product &product, int64_t row, int64_t panel) {
    const float *x = product.x + row * product.x_row;
    const float *weights = product.panels + panel * product.num_inputs * PANEL;
    Vector sums[ROWS][2] = {};
    for (int64_t k = 0; k < product.num_inputs; ++k, weights += PANEL) {
        const Vector left = *reinterpret_cast<const Vector *>(weights);
        const Vector right = *reinterpret_cast<const Vector *>(weights + LANES);
        for (int r = 0; r < ROWS; ++r) {
            const float value = x[r * product.x_row + k];
            sums[r][0] += value * left;
            sums[r][1] += value * right;
        }
    }
    const int64_t column = panel * PANEL, width = std::min<int64_t>(PANEL, product.num_outputs - column);
    for (int r = 0; r < ROWS; ++r) {
        float *target = product.out + (row + r) * product.num_outputs + column;
        const float *source = reinterpret_cast<const float *>(sums[r]);
        for (int64_t c = 0; c < width; ++c) target[c] = source[c] + (product.bias ? product.bias[column + c] : 0.0f);
    }
}

template <int ROWS>
void multiply_rest(const Product &product, int64_t row, int64_t num, int64_t panel) {
    if (num == ROWS) multiply<ROWS>(product, row, panel);
    else if constexpr (ROWS > 1) multiply_rest<ROWS - 1>(product, row, num, panel);
}

}  // namespace

extern "C" int cbresearch_panel_width() { return PANEL; }

extern "C" void cbresearch_linear(const Product *given, int num_threads) {
    const Product &product = *given;
    const int64_t num_panels = (product.num_outputs + PANEL - 1) / PANEL;
    const bool is_large = product.num_rows * product.num_inputs * product.num_outputs > 2000000;
    (void)is_large, (void)num_threads;
#pragma omp parallel for schedule(dynamic, 4) num_threads(num_threads) if (is_large)
    for (int64_t panel = 0; panel < num_panels; ++panel) {
        int64_t row = 0;
        for (; row + PRODUCT_ROWS <= product.num_rows; row += PRODUCT_ROWS)
            multiply<PRODUCT_ROWS>(product, row, panel);
        if (row < product.num_rows) multiply_rest<PRODUCT_ROWS - 1>(product, row, product.num_rows - row, panel);
    }
}

extern "C" void cbresearch_paged_attention(const Call *given, int num_threads) {
    const Call &call = *given;
    const int64_t num_seqs = call.step[0];
    const int64_t tile = std::max<int64_t>(1, TILE_ROWS / (call.num_heads / call.num_kv_heads));
    std::vector<Sequence> sequences;
    struct Item { int64_t seq, first; };
    std::vector<Item> items;
    int64_t num_used = 0, work = 0;
    for (int64_t place = 0; place < num_seqs; ++place) {
        const Sequence seq = sequence(call, place);
        sequences.push_back(seq);
        for (int64_t first = 0; first < seq.num_tokens; first += tile) items.push_back({place, first});
        num_used = std::max(num_used, seq.token + seq.num_tokens);
        work += seq.num_tokens * (seq.start + seq.num_tokens);
        if (seq.is_stored)
            for (int64_t token = 0; token < seq.num_tokens; ++token) store(call, seq, token);
    }
    // Tokens that belong to no sequence only fill the batch up.
    const int64_t row = call.num_heads * call.value_dim;
    std::fill(call.out + num_used * row, call.out + call.num_tokens * row, 0.0f);
    // Waking the other threads takes longer than a small step does.
    const bool is_large = work * row > 400000;
    // Few sequences are shared out by heads too.
    const int64_t num_tiles = items.size(), num_parts = num_tiles < 4 * num_threads ? call.num_kv_heads : 1;
    const int64_t num_heads = call.num_kv_heads / num_parts;
    (void)is_large;
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads) if (is_large)
    for (int64_t item = 0; item < num_tiles * num_parts; ++item) {
        const Item &at = items[item / num_parts];
        const Sequence &seq = sequences[at.seq];
        const int64_t head = item % num_parts * num_heads, last = head + num_heads;
        const int64_t queries = std::min(tile, seq.num_tokens - at.first);
        const int64_t dim = call.key_dim == call.value_dim ? call.key_dim : 0;
        if (dim == 64) attend<64>(call, seq, head, last, at.first, queries);
        else if (dim == 32) attend<32>(call, seq, head, last, at.first, queries);
        else if (dim == 128) attend<128>(call, seq, head, last, at.first, queries);
        else attend<0>(call, seq, head, last, at.first, queries);
    }
}
