// Choosing a token for every row of logits, without sorting the vocabulary. engine/sampling/choose_device.py says what is
// computed; engine/sampling/choose_cpu.py does the same in NumPy.
//
// The vocabulary is looked at in blocks of 64 tokens, whose maxima are kept. top_k: the k-th largest maximum is a lower bound of
// the k-th largest logit, so only what lies above it is selected from. top_p: the probability above a few pivots at once says
// between which two the threshold lies, and only what lies there is looked at again. The race: a token needs a random number
// below exp(its score - best score so far) to win, which one comparison of integers per token rules out for nearly all.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "team.h"

namespace turnkeep {

// Mirrors SampleArgs of engine/kernels/cpu/sampling.py. Arrays have one element per row.
struct SampleArgs {
    const float* logits;      // [rows][vocab], rows `stride` apart
    const uint32_t* bitmask;  // [rows][mask_words], rows `mask_stride` apart; bit i of word w: token 32 w + i is allowed; null: all are
    const uint64_t* seed;
    const uint64_t* position;
    const uint32_t* choice;
    const float* temperature;  // 0: greedy. Null: all rows are, and what only random ones need is null too
    const float* least;        // logarithm of min_p; -infinity: off
    const double* top_p;       // 1: off
    const int64_t* top_k;      // 0: off
    int64_t* chosen;           // out; any token where nothing is allowed or a logit is NaN
    float* largest;            // out: the largest allowed logit
    float* raw_largest;        // out: the largest logit; NaN where there is one
    void* team;
    int64_t rows, vocab, stride, mask_words, mask_stride;
};

// Mirrors ReportArgs of engine/kernels/cpu/sampling.py: log-probabilities of rows of finite logits or -infinity.
struct ReportArgs {
    const float* logits;     // [rows][vocab], rows `stride` apart
    const int64_t* chosen;   // [rows]
    const int64_t* tops;     // [rows]: how many of the most likely tokens, at most `most`
    float* logprob;          // out [rows]: of the chosen tokens
    float* top_logprob;      // out [rows][most]
    int64_t* top_id;         // out [rows][most], most likely first, equal ones in order of their ids
    void* team;
    int64_t rows, vocab, stride, most;
    float floor;             // what is less likely is as likely as this
};

namespace sampling {

constexpr int64_t kBlock = 64;
constexpr float kNever = -std::numeric_limits<float>::infinity();

// GCC's vector extensions: whatever the processor has is used.
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint64_t Longs __attribute__((vector_size(64)));
constexpr int kLanes = 16;

#define TURNKEEP_INLINE inline __attribute__((always_inline))

static TURNKEEP_INLINE Floats load(const float* from) {
    Floats v;
    memcpy(&v, from, sizeof v);
    return v;
}
static TURNKEEP_INLINE void store(float* to, const Floats& v) { memcpy(to, &v, sizeof v); }
static TURNKEEP_INLINE Floats splat(float x) { return Floats{} + x; }
static TURNKEEP_INLINE Floats larger(const Floats& a, const Floats& b) { return a > b ? a : b; }

static TURNKEEP_INLINE float lane_max(const Floats& v) {
    typedef float Half __attribute__((vector_size(32)));
    typedef float Quarter __attribute__((vector_size(16)));
    const Half a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7);
    const Half b = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    const Half h = a > b ? a : b;
    const Quarter c = __builtin_shufflevector(h, h, 0, 1, 2, 3), d = __builtin_shufflevector(h, h, 4, 5, 6, 7);
    const Quarter q = c > d ? c : d;
    const float left = q[0] > q[2] ? q[0] : q[2], right = q[1] > q[3] ? q[1] : q[3];
    return left > right ? left : right;
}

static TURNKEEP_INLINE bool any(const Ints& v) {
    int64_t parts[8], all = 0;
    memcpy(parts, &v, sizeof v);
    for (int64_t part : parts) all |= part;
    return all != 0;
}

// e^x for x <= 0, to about 1e-7; 0 below -87.
static TURNKEEP_INLINE Floats exponential(const Floats& x) {
    const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Floats clamped = x > splat(-87.0f) ? x : splat(-87.0f);
    const Floats shifted = clamped * splat(1.44269504f) + magic;
    const Floats n = shifted - magic;
    const Floats r = clamped - n * splat(0.693359375f) + n * splat(2.12194440e-4f);
    Floats p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    const Ints exponent = ((Ints)shifted - (Ints)magic + 127) << 23;
    const Floats result = p * (Floats)exponent;
    return x > splat(-87.0f) ? result : Floats{};
}

// Philox 4x32-10 and SplitMix64, as engine/sampling/philox.py has them.
static inline uint64_t stream_key(uint64_t seed, uint32_t choice, uint64_t position) {
    uint32_t w0 = uint32_t(position), w1 = uint32_t(position >> 32), w2 = choice, w3 = 0;
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = uint64_t(w0) * 0xD2511F53u, p1 = uint64_t(w2) * 0xCD9E8D57u;
        const uint32_t n0 = uint32_t(p1 >> 32) ^ w1 ^ k0, n2 = uint32_t(p0 >> 32) ^ w3 ^ k1;
        w0 = n0, w1 = uint32_t(p1), w2 = n2, w3 = uint32_t(p0);
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return uint64_t(w1) << 32 | w0;
}

constexpr uint64_t kGamma = 0x9E3779B97F4A7C15u;

// The random words of a block's tokens.
static TURNKEEP_INLINE void random_words(uint64_t key, int64_t block, uint32_t* words) {
    const Longs steps = {0, kGamma, 2 * kGamma, 3 * kGamma, 4 * kGamma, 5 * kGamma, 6 * kGamma, 7 * kGamma};
    uint64_t at = key + kGamma * (uint64_t(block) * (kBlock / 2) + 1);
    for (int part = 0; part < 4; part++, at += 8 * kGamma) {
        Longs x = steps + at;
        x ^= x >> 30;
        x *= 0xBF58476D1CE4E5B9u;
        x ^= x >> 27;
        x *= 0x94D049BB133111EBu;
        x ^= x >> 31;
        memcpy(words + part * 16, &x, sizeof x);
    }
}

// Scratch memory of one row.
struct Row {
    int64_t blocks;
    float* scores;      // [blocks * 64]: (logit - largest) / temperature; -infinity where forbidden and beyond the vocabulary
    float* maxima;      // [blocks rounded up to lanes], of logits, then of scores
    float* candidates;  // [blocks * 64 + lanes]

    static int64_t floats(int64_t vocab) {
        const int64_t blocks = (vocab + kBlock - 1) / kBlock;
        return 2 * blocks * kBlock + kLanes + (blocks + kLanes - 1) / kLanes * kLanes;
    }
    Row(float* scratch, int64_t vocab) : blocks((vocab + kBlock - 1) / kBlock), scores(scratch) {
        candidates = scores + blocks * kBlock;
        maxima = candidates + blocks * kBlock + kLanes;
    }
};

struct Block {
    Floats parts[4];
};

// One block of logits as they are; what lies beyond the vocabulary is -infinity.
static TURNKEEP_INLINE Block read_block(const float* logits, int64_t block, int64_t vocab) {
    float padded[kBlock];
    const float* from = logits + block * kBlock;
    const int64_t left = vocab - block * kBlock;
    if (left < kBlock) {
        std::fill(std::copy(from, from + left, padded), padded + kBlock, kNever);
        from = padded;
    }
    return {{load(from), load(from + 16), load(from + 32), load(from + 48)}};
}

// Takes what is forbidden out of a block.
static TURNKEEP_INLINE void forbid(Block& x, const uint32_t* bitmask, int64_t block, int64_t mask_words) {
    const Words lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int half = 0; half < 2; half++) {
        const int64_t word = block * 2 + half;
        const uint32_t bits = word < mask_words ? bitmask[word] : 0;
        for (int part = 0; part < 2; part++) {
            const Words allowed = ((Words{} + (bits >> (16 * part))) >> lanes) & 1u;
            Floats& v = x.parts[2 * half + part];
            v = allowed != 0u ? v : splat(kNever);
        }
    }
}

struct Largest {
    float value, raw;
    int64_t token;
};

// The first of the largest allowed logits. Fills the maxima of the blocks, of eight at once where only that one is wanted.
template <int Together>
static inline Largest find_largest(const SampleArgs& a, int64_t index, const Row& row) {
    const float* logits = a.logits + index * a.stride;
    const uint32_t* bitmask = a.bitmask ? a.bitmask + index * a.mask_stride : nullptr;
    Floats raw = splat(kNever);
    Ints broken{};
    float largest = kNever;
    int64_t where = 0;
    for (int64_t first = 0; first < row.blocks; first += Together) {
        Floats most = splat(kNever);
        for (int64_t b = first; b < std::min(first + Together, row.blocks); b++) {
            Block x = read_block(logits, b, a.vocab);
            for (const Floats& part : x.parts) {
                broken |= part != part;
                if (bitmask) raw = larger(raw, part);
            }
            if (bitmask) forbid(x, bitmask, b, a.mask_words);
            most = larger(most, larger(larger(x.parts[0], x.parts[1]), larger(x.parts[2], x.parts[3])));
        }
        const float maximum = row.maxima[first / Together] = lane_max(most);
        if (maximum > largest) largest = maximum, where = first;
    }
    const float raw_largest = bitmask ? lane_max(raw) : largest;
    for (int64_t b = where; b < std::min(where + Together, row.blocks); b++) {
        Block x = read_block(logits, b, a.vocab);
        if (bitmask) forbid(x, bitmask, b, a.mask_words);
        float lanes[kBlock];
        memcpy(lanes, &x, sizeof x);
        const int64_t token = b * kBlock + (std::find(lanes, lanes + kBlock, largest) - lanes);
        if (token < (b + 1) * kBlock)
            return {largest, any(broken) ? std::numeric_limits<float>::quiet_NaN() : raw_largest, std::min(token, a.vocab - 1)};
    }
    return {largest, std::numeric_limits<float>::quiet_NaN(), 0};  // nothing but NaN
}

static inline void fill_scores(const SampleArgs& a, int64_t index, float largest, float temperature, const Row& row) {
    const float* logits = a.logits + index * a.stride;
    const uint32_t* bitmask = a.bitmask ? a.bitmask + index * a.mask_stride : nullptr;
    for (int64_t b = 0; b < row.blocks; b++) {
        Block x = read_block(logits, b, a.vocab);
        if (bitmask) forbid(x, bitmask, b, a.mask_words);
        for (int part = 0; part < 4; part++)
            store(row.scores + b * kBlock + part * kLanes, (x.parts[part] - splat(largest)) / splat(temperature));
        row.maxima[b] = (row.maxima[b] - largest) / temperature;
    }
}

// Copies those of n scores (a multiple of the lanes) with low <= score < high; how many.
static inline int64_t select(const float* from, int64_t n, float low, float high, float* to) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += kLanes) {
#if defined(__AVX512F__)
        const __m512 v = _mm512_loadu_ps(from + i);
        const __mmask16 in = _mm512_cmp_ps_mask(v, _mm512_set1_ps(low), _CMP_GE_OQ) &
                             _mm512_cmp_ps_mask(v, _mm512_set1_ps(high), _CMP_LT_OQ);
        _mm512_storeu_ps(to + count, _mm512_maskz_compress_ps(in, v));
        count += __builtin_popcount(in);
#else
        for (int64_t j = i; j < i + kLanes; j++) {
            to[count] = from[j];
            count += from[j] >= low && from[j] < high;
        }
#endif
    }
    return count;
}

// Pads with what counts for nothing; n rounded up to the lanes.
static inline int64_t pad(float* scores, int64_t n) {
    const int64_t padded = (n + kLanes - 1) / kLanes * kLanes;
    std::fill(scores + n, scores + padded, kNever);
    return padded;
}

// The k-th largest score, k below the vocabulary's size. Leaves those at or above it among `row.candidates`, their number in n.
static inline float kth_largest(const Row& row, int64_t k, int64_t& n) {
    float bound = kNever;
    if (k <= row.blocks) {
        std::copy(row.maxima, row.maxima + row.blocks, row.candidates);
        std::nth_element(row.candidates, row.candidates + k - 1, row.candidates + row.blocks, std::greater<float>());
        bound = row.candidates[k - 1];
    }
    n = 0;
    for (int64_t b = 0; b < row.blocks; b++) {
        if (row.maxima[b] < bound) continue;
        n += select(row.scores + b * kBlock, kBlock, bound, std::numeric_limits<float>::infinity(), row.candidates + n);
    }
    if (n < k) return kNever;  // the others are forbidden
    std::nth_element(row.candidates, row.candidates + k - 1, row.candidates + n, std::greater<float>());
    return row.candidates[k - 1];
}

constexpr int kPivots = 7;

struct Masses {
    double above[kPivots];  // e^score of the scores at or above each pivot
    double total;
};

// Of those of n scores (a multiple of the lanes) that lie at or above `floor`. Sums of 1024 are float32, all else is float64.
static inline Masses masses(const float* scores, int64_t n, const float* pivots, float floor) {
    Masses sums{};
    for (int64_t start = 0; start < n; start += 1024) {
        const int64_t end = std::min(n, start + 1024);
        Floats part[kPivots + 1] = {};
        for (int64_t i = start; i < end; i += kLanes) {
            const Floats z = load(scores + i);
            const Floats weight = z >= splat(floor) ? exponential(z) : Floats{};
            part[kPivots] += weight;
            for (int p = 0; p < kPivots; p++) part[p] += z >= splat(pivots[p]) ? weight : Floats{};
        }
        for (int p = 0; p <= kPivots; p++) {
            double sum = 0.0;
            for (int j = 0; j < kLanes; j++) sum += part[p][j];
            (p < kPivots ? sums.above[p] : sums.total) += sum;
        }
    }
    return sums;
}

// The least score of the nucleus: the smallest one that those above it leave below top_p of the weight of the n scores
// (a multiple of the lanes) at or above `floor`. Works in `buffer`, which may be where the scores lie.
static inline float nucleus(const float* scores, int64_t n, float floor, double top_p, float* buffer) {
    float pivots[kPivots] = {-0.5f, -1.0f, -2.0f, -4.0f, -7.0f, -11.0f, -16.0f};
    float low = floor, high = std::numeric_limits<float>::infinity();
    double before = 0.0, target = 0.0;
    for (int round = 0; round < 8; round++) {
        const Masses sums = masses(scores, n, pivots, low);
        if (round == 0) target = top_p * sums.total;
        int p = 0;
        while (p < kPivots && before + sums.above[p] < target) p++;
        if (p > 0) {
            before += sums.above[p - 1];
            high = std::min(high, pivots[p - 1]);
        }
        low = std::max(low, p < kPivots ? pivots[p] : -87.0f);  // what is less likely counts for nothing
        const int64_t left = select(scores, n, low, high, buffer);
        if (left == 0) return floor;  // rounding: the scores above do not quite reach the target
        n = pad(buffer, left);
        scores = buffer;
        const auto ends = std::minmax_element(buffer, buffer + left);
        const float least = *ends.first, most = *ends.second;
        if (least == most) return least;
        if (left <= 2 * kBlock || round == 7) {
            std::sort(buffer, buffer + left, std::greater<float>());
            float kept = buffer[0];
            for (int64_t i = 0; i < left && before < target; i++) {
                kept = buffer[i];
                before += std::exp(double(kept));
            }
            return kept;
        }
        for (int i = 0; i < kPivots; i++) pivots[i] = most - (most - least) * float(i + 1) / float(kPivots + 1);
    }
    return low;
}

// log of an exponential variate, as _log_exponential of choose_cpu.py makes it of a random word.
static inline float log_exponential(uint32_t word) {
    const float u = std::min((float(word) + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
    return std::log(-std::log1p(-u));
}

// The token with the largest score - log(exponential variate), of those at or above `threshold`. `first`: a likely one.
static inline int64_t race(const Row& row, uint64_t key, float threshold, int64_t first) {
    float best = kNever;
    int64_t winner = first;
    const auto run = [&](int64_t block, uint32_t limit) {
        alignas(64) uint32_t words[kBlock];
        random_words(key, block, words);
        Ints close{};
        for (int part = 0; part < 4; part++) {
            Words w;
            memcpy(&w, words + part * kLanes, sizeof w);
            close |= w <= limit;
        }
        if (!any(close)) return;
        const float* scores = row.scores + block * kBlock;
        for (int j = 0; j < kBlock; j++) {
            if (words[j] > limit || !(scores[j] >= threshold)) continue;
            const float score = scores[j] - log_exponential(words[j]);
            const int64_t token = block * kBlock + j;
            if (score > best || (score == best && token < winner)) best = score, winner = token;
        }
    };
    const int64_t likely = first / kBlock;
    run(likely, 0xFFFFFFFFu);
    for (int64_t b = row.blocks; b % kLanes; b++) row.maxima[b] = kNever;
    for (int64_t group = 0; group < row.blocks; group += kLanes) {
        const Floats maxima = load(row.maxima + group);
        const Floats reach = maxima - splat(best);
        // An exponential variate is no smaller than the uniform one it is made of. The rest is room for rounding.
        const Floats share = exponential(reach < Floats{} ? reach : Floats{});
        for (int j = 0; j < kLanes; j++) {
            const int64_t block = group + j;
            if (block >= row.blocks || block == likely || !(maxima[j] >= threshold) || maxima[j] == kNever) continue;
            run(block, uint32_t(std::min(double(share[j]) * (0x1p32 * 1.0001) + 2.0, 4294967295.0)));
        }
    }
    return winner;
}

static inline void choose(const SampleArgs& a, int64_t index, float* scratch) {
    const Row row(scratch, a.vocab);
    const float temperature = a.temperature ? a.temperature[index] : 0.0f;
    const Largest largest = temperature == 0.0f ? find_largest<8>(a, index, row) : find_largest<1>(a, index, row);
    a.chosen[index] = largest.token;
    a.largest[index] = largest.value;
    a.raw_largest[index] = largest.raw;
    if (temperature == 0.0f || !std::isfinite(largest.value) || !std::isfinite(largest.raw)) return;
    fill_scores(a, index, largest.value, temperature, row);
    float threshold = a.least[index];
    const float* scores = row.scores;
    int64_t n = row.blocks * kBlock;
    if (a.top_k[index] > 0 && a.top_k[index] < a.vocab) {
        int64_t held;
        threshold = std::max(threshold, kth_largest(row, a.top_k[index], held));
        if (held >= a.top_k[index]) {
            scores = row.candidates;
            n = pad(row.candidates, held);
        }
    }
    if (a.top_p[index] < 1.0) threshold = std::max(threshold, nucleus(scores, n, threshold, a.top_p[index], row.candidates));
    const uint64_t key = stream_key(a.seed[index], a.choice[index], a.position[index]);
    a.chosen[index] = race(row, key, threshold, largest.token);
}

static inline void report(const ReportArgs& r, int64_t index, float* scratch) {
    SampleArgs a{};
    a.logits = r.logits, a.vocab = r.vocab, a.stride = r.stride;
    const Row row(scratch, r.vocab);
    const float largest = find_largest<1>(a, index, row).value;
    fill_scores(a, index, largest, 1.0f, row);
    const float none[kPivots] = {};
    const double normaliser = std::log(masses(row.scores, row.blocks * kBlock, none, kNever).total);
    const auto logprob = [&](int64_t token) { return std::max(float(row.scores[token] - normaliser), r.floor); };
    r.logprob[index] = logprob(r.chosen[index]);
    const int64_t top = std::min(r.tops[index], r.vocab);
    if (top == 0) return;
    int64_t held = 0;
    const float least = top < r.vocab ? kth_largest(row, top, held) : kNever;
    std::vector<int64_t> ids;
    for (int64_t b = 0; b < row.blocks; b++) {
        if (!(row.maxima[b] >= least)) continue;
        for (int64_t token = b * kBlock; token < std::min((b + 1) * kBlock, r.vocab); token++)
            if (row.scores[token] >= least) ids.push_back(token);
    }
    const auto before = [&](int64_t x, int64_t y) {
        return row.scores[x] != row.scores[y] ? row.scores[x] > row.scores[y] : x < y;
    };
    std::partial_sort(ids.begin(), ids.begin() + top, ids.end(), before);
    for (int64_t i = 0; i < top; i++) {
        r.top_id[index * r.most + i] = ids[i];
        r.top_logprob[index * r.most + i] = logprob(ids[i]);
    }
}

// Calls work(row, scratch) for every row, on all threads.
template <class Work>
static inline void each_row(void* threads, int64_t rows, int64_t vocab, const Work& work) {
    const int64_t floats = Row::floats(vocab);
    const auto one = [&](int64_t index) {
        static thread_local std::unique_ptr<float[]> scratch;
        static thread_local int64_t held = 0;
        if (held < floats) scratch.reset(new float[floats]), held = floats;
        work(index, scratch.get());
    };
    if (rows == 1) return one(0);  // not worth waking anybody
    Team& team = *static_cast<Team*>(threads);
    Team::Pass pass(team);
    team.run(rows, one);
}

}  // namespace sampling

static inline void sample(const SampleArgs& a) {
    sampling::each_row(a.team, a.rows, a.vocab, [&](int64_t index, float* scratch) { sampling::choose(a, index, scratch); });
}

static inline void report(const ReportArgs& r) {
    sampling::each_row(r.team, r.rows, r.vocab, [&](int64_t index, float* scratch) { sampling::report(r, index, scratch); });
}

}  // namespace turnkeep
