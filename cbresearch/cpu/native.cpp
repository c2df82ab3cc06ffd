// Attention over a paged float32 KV cache and products of linear layers, for a ragged batch of decodes and prompt
// chunks, on a CPU.
//
// What a row or a query gets depends neither on the others in the batch nor on the number of threads.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

// How long a thread looks for the next job before it sleeps: a step's jobs follow each other more closely.
constexpr auto PATIENCE = std::chrono::microseconds(200);
// A begun item takes a few microseconds. Where it takes this long, its thread has lost its core to another process.
constexpr auto STALL = std::chrono::microseconds(500);
// For how long the caller then does all by itself.
constexpr auto RETREAT = std::chrono::milliseconds(100);

// Threads that take items of a job while there are any. The caller takes items too and waits only for those that
// the caller has begun, never for a thread to wake up: where another process keeps a core busy, the others go on.
class Pool {
public:
    int num_threads = 1;

    template <class Item>
    void run(int64_t num_items, bool is_large, const Item &item) {
        std::unique_lock<std::mutex> one_job(job_mutex, std::defer_lock);
        // A second engine in the process goes on alone meanwhile.
        if (!is_large || num_threads < 2 || num_items < 2 || !one_job.try_lock() || Clock::now() < back) {
            for (int64_t place = 0; place < num_items; ++place) item(place);
            return;
        }
        for (; num_helpers < num_threads - 1; ++num_helpers)
            std::thread([this, number = num_helpers] { help(number); }).detach();
        // From here on no item of the last job can be taken, whatever is written below.
        next |= UINT32_MAX;
        call = [](const void *given, int64_t place) { (*static_cast<const Item *>(given))(place); };
        argument = &item, count = num_items, num_wanted = num_threads - 1, num_done = 0;
        const uint64_t job = (next >> 32) + 1;
        next = job << 32;
        if (num_asleep) {
            std::lock_guard<std::mutex> lock(sleep_mutex);
            bell.notify_all();
        }
        work(job);
        if (num_done == num_items) return;
        const auto began = Clock::now();
        while (num_done < num_items) std::this_thread::yield();
        const auto now = Clock::now();
        if (now - began > STALL) back = now + RETREAT;
    }

private:
    std::mutex job_mutex, sleep_mutex;
    std::condition_variable bell;
    Clock::time_point back;
    int num_helpers = 0;
    // The number of the job and, in the lower half, of its next item, which is taken by counting it up.
    std::atomic<uint64_t> next{0};
    std::atomic<void (*)(const void *, int64_t)> call{nullptr};
    std::atomic<const void *> argument{nullptr};
    std::atomic<int64_t> count{0}, num_done{0};
    std::atomic<int> num_wanted{0}, num_asleep{0};

    void work(uint64_t job) {
        for (uint64_t taken = next; taken >> 32 == job; taken = next) {
            // If these are of another job, the item is not got.
            const auto called = call.load();
            const auto given = argument.load();
            const int64_t place = taken & UINT32_MAX;
            if (place >= count) return;
            if (!next.compare_exchange_strong(taken, taken + 1)) continue;
            called(given, place);
            ++num_done;
        }
    }

    [[noreturn]] void help(int number) {
        for (uint64_t seen = 0;;) {
            for (const auto end = Clock::now() + PATIENCE; next >> 32 == seen && Clock::now() < end;)
                std::this_thread::yield();
            if (next >> 32 == seen) {
                std::unique_lock<std::mutex> lock(sleep_mutex);
                ++num_asleep;
                bell.wait(lock, [&] { return next >> 32 != seen; });
                --num_asleep;
            }
            seen = next >> 32;
            if (number < num_wanted) work(seen);
        }
    }
};

// Never destroyed, since its threads end with the process.
Pool &pool() {
    static Pool *const made = new Pool;
    return *made;
}

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(LANES * sizeof(int32_t)), aligned(4)));

inline Vector load(const float *source) { return *reinterpret_cast<const Vector *>(source); }
inline void store(float *target, Vector values) { *reinterpret_cast<Vector *>(target) = values; }

// The sums of neighbours, those of `a` before those of `b`.
inline Vector pairs(Vector a, Vector b) {
#ifdef __AVX512F__
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#else
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14) +
           __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#endif
}

// exp(x) for x <= 0; about 1e-7 relative. Below -87 it is 0.
inline Vector exponential(Vector x) {
    const Vector clamped = x < -87.0f ? Vector{} - 87.0f : x;
    const Integers n = __builtin_convertvector(clamped * 1.44269504f - 0.5f, Integers);
    const Vector whole = __builtin_convertvector(n, Vector);
    const Vector r = (clamped - whole * 0.693359375f) + whole * 2.12194440e-4f;
    Vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return x < -87.0f ? Vector{} : p * reinterpret_cast<Vector>((n + 127) << 23);
}

inline float largest(Vector x) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
    return x[0];
}

// The sum of each of some vectors; they are used up.
inline Vector sums_of(Vector (&vectors)[LANES]) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) vectors[i] = pairs(vectors[2 * i], vectors[2 * i + 1]);
    return vectors[0];
}

// Few keys, since those of a tile lie apart by a power of two, and share few places of the processor's cache. A
// multiple of `LANES`.
constexpr int TILE_KEYS = 16;
constexpr int TILE_ROWS = 8;
constexpr float INF = std::numeric_limits<float>::infinity();

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
    const int64_t whole = key_dim / LANES * LANES, whole_values = value_dim / LANES * LANES;
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
        const int64_t low = std::max(begin, seen_from) - begin, high = std::min<int64_t>(TILE_KEYS, end - begin);
        // Places that hold no key stand for another one, whose score is not used.
        const float *slots[TILE_KEYS];
        std::fill_n(slots, TILE_KEYS, slot(call, seq, begin + low) + head * head_size);
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
            alignas(64) float weight[TILE_KEYS];
            const float *query = &q[row * key_dim];
            for (int64_t part = 0; part < TILE_KEYS; part += LANES) {
                Vector products[LANES] = {};
                for (int j = 0; j < LANES; ++j)
                    for (int64_t d = 0; d < whole; d += LANES)
                        products[j] += load(query + d) * load(slots[part + j] + offset + d);
                store(weight + part, sums_of(products));
            }
            if (whole < key_dim)
                for (int64_t j = 0; j < TILE_KEYS; ++j)
                    for (int64_t d = whole; d < key_dim; ++d) weight[j] += query[d] * slots[j][offset + d];
            if (call.softcap > 0.0f)
                for (float &score : weight) score = call.softcap * std::tanh(score / call.softcap);
            std::fill(weight, weight + from, -INF);
            std::fill(weight + to, weight + TILE_KEYS, -INF);
            float new_top = top[row], total = 0.0f;
            for (int64_t part = 0; part < TILE_KEYS; part += LANES)
                new_top = std::max(new_top, largest(load(weight + part)));
            for (int64_t part = 0; part < TILE_KEYS; part += LANES) {
                const Vector weights = exponential(load(weight + part) - new_top);
                store(weight + part, weights);
                for (int j = 0; j < LANES; ++j) total += weights[j];
            }
            const float decay = top[row] == -INF ? 0.0f : exponential(Vector{} + (top[row] - new_top))[0];
            sum[row] = sum[row] * decay + total;
            top[row] = new_top;
            float *sums = &acc[row * value_dim];
            for (int64_t d = 0; d < whole_values; d += LANES) {
                Vector value_sum = load(sums + d) * decay;
                for (int64_t j = from; j < to; ++j) value_sum += weight[j] * load(slots[j] + offset + key_dim + d);
                store(sums + d, value_sum);
            }
            for (int64_t d = whole_values; d < value_dim; ++d) {
                sums[d] *= decay;
                for (int64_t j = from; j < to; ++j) sums[d] += weight[j] * slots[j][offset + key_dim + d];
            }
        }
    }
    for (int64_t row = 0; row < all_rows; ++row) {
        float *target = call.out + (token(row) * call.num_heads + query_head(row)) * value_dim;
        for (int64_t d = 0; d < value_dim; ++d) target[d] = acc[row * value_dim + d] / sum[row];
    }
}

// Weights are packed: `PANEL` outputs lie side by side, input by input, so that a product reads them as one stream
// and adds in the order of the inputs. A tile of a product is some rows times a panel; it fits into the registers.
#ifdef __AVX512F__
constexpr int ROWS = 8, VECTORS = 3;
#else
constexpr int ROWS = 6, VECTORS = 2;
#endif
constexpr int PANEL = VECTORS * LANES;
// Rows that a thread takes at a time: its panel and they stay in the cache.
constexpr int STRIPE = 64;

struct Product {
    const float *x, *panels, *bias;
    float *out;
    int64_t num_rows, num_inputs, num_outputs;
};

template <int NUM_ROWS>
void multiply(const Product &product, int64_t row, int64_t panel) {
    const int64_t size = product.num_inputs, first = panel * PANEL;
    const float *x = product.x + row * size, *weight = product.panels + first * size;
    Vector sums[NUM_ROWS][VECTORS] = {};
    for (int64_t k = 0; k < size; ++k, weight += PANEL) {
        Vector weights[VECTORS];
        for (int v = 0; v < VECTORS; ++v) {
            weights[v] = load(weight + v * LANES);
            __builtin_prefetch(weight + v * LANES + 16 * PANEL);
        }
        for (int r = 0; r < NUM_ROWS; ++r)
            for (int v = 0; v < VECTORS; ++v) sums[r][v] += x[r * size + k] * weights[v];
    }
    const int64_t num_columns = std::min<int64_t>(PANEL, product.num_outputs - first);
    for (int r = 0; r < NUM_ROWS; ++r) {
        float *out = product.out + (row + r) * product.num_outputs + first;
        alignas(64) float line[PANEL];
        for (int v = 0; v < VECTORS; ++v) store(line + v * LANES, sums[r][v]);
        for (int64_t c = 0; c < num_columns; ++c) out[c] = line[c] + (product.bias ? product.bias[first + c] : 0.0f);
    }
}

// Calls `multiply` with a number of rows that is known only now.
template <int NUM_ROWS = ROWS>
void multiply_tile(const Product &product, int64_t row, int64_t panel, int64_t num_rows) {
    if constexpr (NUM_ROWS > 1)
        if (num_rows < NUM_ROWS) return multiply_tile<NUM_ROWS - 1>(product, row, panel, num_rows);
    multiply<NUM_ROWS>(product, row, panel);
}

}  // namespace

extern "C" void cbresearch_use_threads(int number) { pool().num_threads = number; }

extern "C" int cbresearch_panel() { return PANEL; }

extern "C" void cbresearch_linear(
    const float *x, const float *panels, const float *bias, float *out, int64_t num_rows, int64_t num_inputs,
    int64_t num_outputs) {
    const Product product = {x, panels, bias, out, num_rows, num_inputs, num_outputs};
    const bool is_large = num_inputs * num_outputs * std::min<int64_t>(num_rows, 4) > 400000;
    const int64_t num_panels = (num_outputs + PANEL - 1) / PANEL, num_stripes = (num_rows + STRIPE - 1) / STRIPE;
    pool().run(num_panels * num_stripes, is_large, [&](int64_t item) {
        const int64_t first = item % num_stripes * STRIPE, end = std::min(num_rows, first + STRIPE);
        for (int64_t row = first; row < end; row += ROWS)
            multiply_tile(product, row, item / num_stripes, std::min<int64_t>(ROWS, end - row));
    });
}

extern "C" void cbresearch_paged_attention(const Call *given) {
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
    const bool is_large = work * row > 200000;
    // Few sequences are shared out by heads too.
    const int64_t num_tiles = items.size(), num_parts = num_tiles < 4 * pool().num_threads ? call.num_kv_heads : 1;
    const int64_t num_heads = call.num_kv_heads / num_parts;
    pool().run(num_tiles * num_parts, is_large, [&](int64_t item) {
        const Item &at = items[item / num_parts];
        const Sequence &seq = sequences[at.seq];
        const int64_t head = item % num_parts * num_heads, last = head + num_heads;
        const int64_t queries = std::min(tile, seq.num_tokens - at.first);
        const int64_t dim = call.key_dim == call.value_dim ? call.key_dim : 0;
        if (dim == 64) attend<64>(call, seq, head, last, at.first, queries);
        else if (dim == 32) attend<32>(call, seq, head, last, at.first, queries);
        else if (dim == 128) attend<128>(call, seq, head, last, at.first, queries);
        else attend<0>(call, seq, head, last, at.first, queries);
    });
}
