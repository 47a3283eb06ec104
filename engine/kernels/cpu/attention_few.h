// The tile of few rows (decode): memory is what bounds it, so keys and values are widened in registers as they are read, once for up
// to four rows, and the next ones are asked for meanwhile. A row takes its dot products key by key; sixteen are summed at once.
#pragma once
#include "attention.h"

namespace turnkeep {

#ifdef __AVX512F__
constexpr int kFewVectors = 16;  // rows at once x vectors of a row: these sums stay in registers
#else
constexpr int kFewVectors = 8;
#endif

// One key or value in registers, as floats or codes. bfloat16 comes as even and odd dims of each 32, which costs one operation a
// register instead of two; queries and answers are brought into the same order.
template <class T, int D>
#ifdef __AVX512F__
constexpr bool kPaired = std::is_same_v<T, BFloat16>&& D % 32 == 0;
#else
constexpr bool kPaired = false;  // sixteen-lane shuffles would be taken apart lane by lane
#endif

template <class T, int D>
static inline __attribute__((always_inline)) void widen(const T* from, Vec* to) {
    if constexpr (kPaired<T, D>) {
        for (int d = 0; d < D / 32; d++) {
            UVec pairs;
            memcpy(&pairs, from + 32 * d, sizeof pairs);
            const UVec even = pairs << 16, odd = pairs & 0xffff0000u;
            memcpy(&to[2 * d], &even, sizeof even);
            memcpy(&to[2 * d + 1], &odd, sizeof odd);
        }
    } else {
        for (int d = 0; d < D / kLanes; d++) to[d] = load(from + d * kLanes);
    }
}

template <class T, int D>
static inline void to_widened_order(Vec* row) {
    if constexpr (kPaired<T, D>) {
        const IVec evens = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
        for (int d = 0; d < D / kLanes; d += 2) {
            const Vec a = row[d], b = row[d + 1];
            row[d] = __builtin_shuffle(a, b, evens);
            row[d + 1] = __builtin_shuffle(a, b, evens + 1);
        }
    }
}

template <class T, int D>
static inline void from_widened_order(float* row) {
    if constexpr (kPaired<T, D>) {
        const IVec low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
        for (int d = 0; d < D; d += 2 * kLanes) {
            const Vec even = load(row + d), odd = load(row + d + kLanes);
            store(row + d, __builtin_shuffle(even, odd, low));
            store(row + d + kLanes, __builtin_shuffle(even, odd, low + 8));
        }
    }
}

// The keys of a chunk, padded to a multiple of 16 by repeating the last.
template <class T>
struct Chunk {
    const T* keys[kChunk];
    const T* values[kChunk];
    alignas(64) float key_scales[kChunk], value_scales[kChunk];  // of int8 only
    int padded;
};

// Asks the second-level cache for the keys and values of a chunk, sixteen tokens of one head at a time, in the order in which they lie:
// the heads of a block are neighbours, and runs of one head alone, at block tables' whim, are too short for the hardware to follow.
template <class T, int D>
class Asker {
  public:
    // For keys [begin, end) of all heads of the tile, in `steps` steps.
    Asker(const AttentionArgs& a, const Tile& t, int begin, int end, int steps) : a_(a), t_(t), key_(begin), end_(end) {
        const int pieces = (end - begin + kLanes - 1) / kLanes * 2 * t.heads;
        at_once_ = begin < end ? (pieces + steps - 1) / steps : 0;
    }

    // What is to be asked for during one step: kLanes times kEach bytes from here, a sixteenth with every key, since the processor
    // waits where more is asked for than it can keep in flight.
    const char* step() {
        const char* piece = next();
        for (int i = 1; i < at_once_ && key_ < end_; i++) {
            const char* more = next();
            for (int j = 0; j < kLanes; j++) ask(more, j);
        }
        return piece;
    }

    static inline __attribute__((always_inline)) void ask(const char* piece, int key) {
        for (int64_t b = 0; b < kEach; b += 64) __builtin_prefetch(piece + key * kEach + b, 0, 2);
    }

  private:
    static constexpr int64_t kEach = std::max<int64_t>(64, D * sizeof(T));

    // The next sixteen tokens of a head; when there are none left, what is at hand.
    const char* next() {
        if (key_ >= end_) return reinterpret_cast<const char*>(this);
        const char* from = reinterpret_cast<const char*>(key_block<T>(a_, t_, key_, side_) + head_ * a_.kv_head +
                                                         key_ % a_.block_size * (std::is_same_v<T, Int8> ? D : a_.kv_token));
        if (++head_ == t_.heads) {
            head_ = 0;
            side_ ^= 1;
            if (!side_) key_ += kLanes;
        }
        return from;
    }

    const AttentionArgs& a_;
    const Tile& t_;
    int key_, end_, at_once_, side_ = 0, head_ = 0;
};

// R rows' dot products with the keys of a chunk: scores[r * kChunk + key].
template <class T, int D, int R>
static __attribute__((noinline)) void score_rows(const Chunk<T>& c, const Vec* query, float* scores, Asker<T, D>& asker) {
    constexpr int kVectors = D / kLanes;
    for (int k = 0; k < c.padded; k += kLanes) {
        const char* piece = asker.step();
        Vec partial[R][kLanes];
#pragma GCC unroll 2
        for (int j = 0; j < kLanes; j++) {
            Asker<T, D>::ask(piece, j);
            Vec key[kVectors];
            widen<T, D>(c.keys[k + j], key);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                Vec s = query[r * kVectors] * key[0];
                for (int d = 1; d < kVectors; d++) s += query[r * kVectors + d] * key[d];
                partial[r][j] = s;
            }
        }
        for (int r = 0; r < R; r++) {
            Vec s = sum_each(partial[r]);
            if constexpr (std::is_same_v<T, Int8>) s *= load(c.key_scales + k);
            store(scores + r * kChunk + k, s);
        }
    }
}

// R rows' sums of values weighted by their probabilities.
template <class T, int D, int R>
static __attribute__((noinline)) void gather_rows(const Chunk<T>& c, const float* probabilities, float* acc, Asker<T, D>& asker) {
    constexpr int kVectors = D / kLanes;
    Vec sum[R][kVectors];
    for (int r = 0; r < R; r++)
        for (int d = 0; d < kVectors; d++) sum[r][d] = load(acc + r * D + d * kLanes);
    for (int k = 0; k < c.padded; k += kLanes) {
        const char* piece = asker.step();
#pragma GCC unroll 2
        for (int j = 0; j < kLanes; j++) {
            Asker<T, D>::ask(piece, j);
            Vec value[kVectors];
            widen<T, D>(c.values[k + j], value);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const float p = probabilities[r * kChunk + k + j];
                for (int d = 0; d < kVectors; d++) sum[r][d] += p * value[d];
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int d = 0; d < kVectors; d++) store(acc + r * D + d * kLanes, sum[r][d]);
}

// Rows [row, row + R) of one head against one chunk. acc, maximum, sum: of the head's first row.
template <class T, int D, int R>
static void attend_rows(const AttentionArgs& a, const Tile& t, const Chunk<T>& c, int begin, int keys, int row, const Vec* query,
                        float* acc, float* maximum, float* sum, Asker<T, D>& asker) {
    alignas(64) float scores[R * kChunk];
    score_rows<T, D, R>(c, query + row * (D / kLanes), scores, asker);
    for (int r = 0; r < R; r++) {
        const Visible v = visible(a, t, t.row + row + r);
        const int first = v.first - begin, last = std::min(v.last - begin, keys - 1);
        float* s = scores + r * kChunk;
        float* to = acc + (row + r) * D;
        if (last < 0 || first >= keys) {
            std::fill(s, s + c.padded, 0.0f);
            continue;
        }
        const float shrink = softmax_chunk(s, c.padded, a.scale, first, last, maximum[row + r], sum[row + r]);
        if (shrink != 1.0f)
            for (int d = 0; d < D; d += kLanes) store(to + d, load(to + d) * shrink);
        if constexpr (std::is_same_v<T, Int8>)
            for (int k = 0; k < c.padded; k += kLanes) store(s + k, load(s + k) * load(c.value_scales + k));
    }
    gather_rows<T, D, R>(c, scores, acc + row * D, asker);
}

// `t`: one head of a tile, against keys [begin, begin + keys).
template <class T, int D>
static void attend_few(const AttentionArgs& a, const Tile& t, int begin, int keys, float* acc, float* maximum, float* sum, Asker<T, D>& asker) {
    constexpr int kVectors = D / kLanes, kAtOnce = kVectors <= kFewVectors / 4 ? 4 : kVectors <= kFewVectors / 2 ? 2 : 1;
    Vec query[kFewRows * kVectors];
    for (int r = 0; r < t.rows; r++) {
        const IoOf<T>* q = query_row<T>(a, t, t.row + r);
        for (int d = 0; d < kVectors; d++) query[r * kVectors + d] = load(q + d * kLanes);
        to_widened_order<T, D>(query + r * kVectors);
    }
    Chunk<T> c;
    c.padded = (keys + kLanes - 1) / kLanes * kLanes;
    for_keys<T, D>(a, t, begin, keys, [&](int j, const T* k, const T* v, float k_scale, float v_scale) {
        c.keys[j] = k;
        c.values[j] = v;
        if constexpr (std::is_same_v<T, Int8>) {
            c.key_scales[j] = k_scale;
            c.value_scales[j] = v_scale;
        }
    });
    for (int j = keys; j < c.padded; j++) {
        c.keys[j] = c.keys[keys - 1];
        c.values[j] = c.values[keys - 1];
        c.key_scales[j] = c.key_scales[keys - 1];
        c.value_scales[j] = c.value_scales[keys - 1];
    }
    int r = 0;
    for (; r + kAtOnce <= t.rows; r += kAtOnce) attend_rows<T, D, kAtOnce>(a, t, c, begin, keys, r, query, acc, maximum, sum, asker);
    if constexpr (kAtOnce == 4) {
        if (t.rows - r == 3) attend_rows<T, D, 3>(a, t, c, begin, keys, r, query, acc, maximum, sum, asker);
        if (t.rows - r == 2) attend_rows<T, D, 2>(a, t, c, begin, keys, r, query, acc, maximum, sum, asker);
    }
    if (t.rows - r == 1) attend_rows<T, D, 1>(a, t, c, begin, keys, r, query, acc, maximum, sum, asker);
}

template <class T, int D>
static void tile_few_rows(const AttentionArgs& a, const Tile& t, Rows& state) {
    // The first chunk is a short one: nobody has asked for its keys.
    for (int begin = t.key_begin, most = kChunk / 4; begin < t.key_end; begin += most, most = kChunk) {
        const int end = std::min(begin + most, t.key_end), keys = end - begin;
        Asker<T, D> asker(a, t, end, std::min(end + kChunk, t.key_end), (keys + kLanes - 1) / kLanes * 2 * t.heads);
        for (int h = 0; h < t.heads; h++) {
            const int row = h * t.rows;
            attend_few<T, D>(a, head_of(t, h), begin, keys, state.acc + row * D, state.maximum + row, state.sum + row, asker);
        }
    }
    for (int r = 0; r < t.heads * t.rows; r++) from_widened_order<T, D>(state.acc + r * D);
}

}  // namespace turnkeep
