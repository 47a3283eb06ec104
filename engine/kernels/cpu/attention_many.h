// The tile of many rows (prefill) without AMX. Vectors run over rows: scores and answers are kept transposed, [key][row] and
// [dim][row], so that keys and values enter as broadcasts from the order they lie in, the softmax needs no sums across lanes, and
// probabilities are multiplied as they stand. A chunk of keys is widened once for all rows of the tile.
//
// With AVX512-FP16 products are taken in half precision, twice as many at once. What keeps their error below that of keys and values
// stored in bfloat16:
// - at most 32 products are added up in half precision before two such sums meet, 64 for the values; then sums go on in float32;
// - the mean of the tile's first keys is taken off every key: a softmax does not change when all its scores move by one amount, and
//   keys often share a large part (Qwen2's key biases). SageAttention (arXiv 2410.02367) does the same before it quantises;
// - a chunk whose sums could leave the range of half precision is computed in float32.
#pragma once
#include <cmath>
#include <memory>

#include "attention.h"
#if defined(__AVX512FP16__) && defined(__AVX512BW__)
#define TURNKEEP_FP16 1
#include <immintrin.h>
#endif

namespace turnkeep {

constexpr int kSubRows = 96;   // rows whose scores are computed together
constexpr int kManyKeys = 64;  // keys of a chunk
constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.69314718055994531f;

#if defined(__AVX512F__)
constexpr int kBlockKeys = 8, kBlockVectors = 3;  // 24 accumulators of 32 registers
#else
constexpr int kBlockKeys = 4, kBlockVectors = 1;
#endif

typedef int16_t SVec __attribute__((vector_size(32)));

// How a chunk is computed. Packed: what a key's or value's elements are broadcast from.
struct Single {
    using Vector = Vec;
    using Element = float;
    using Packed = float;
    static constexpr int kWidth = 16;
    static constexpr bool kHalf = false;
    static constexpr float kLowest = kNegative;

    static Vec load_elements(const float* p) { return load(p); }
    static void store_elements(float* p, Vec v) { store(p, v); }
    static Vec broadcast(const float* p) { return splat(*p); }
    static Vec multiply_add(Vec a, Vec b, Vec c) { return a * b + c; }
    static Vec largest(Vec v, Vec top) { return vmax(v, top); }  // a NaN in v is passed over
    static Vec all(float x) { return splat(x); }
    static void pack(Vec x, float* to) { store(to, x); }
    static Vec exp2(Vec x) { return exp2_nonpositive(x); }
    static Vec narrow(const float* p) { return load(p); }
    static void widen(Vec v, Vec* to) { to[0] = v; }

    static Vec hide(Vec s, const int16_t* first, const int16_t* last, int key) {
        SVec f, l;
        memcpy(&f, first, sizeof f);
        memcpy(&l, last, sizeof l);
        const IVec hidden = (__builtin_convertvector(f, IVec) > key) | (__builtin_convertvector(l, IVec) < key);
        return hidden ? splat(-INFINITY) : s;
    }
};

#ifdef TURNKEEP_FP16
struct Half {
    using Vector = __m512h;
    using Element = _Float16;
    using Packed = uint32_t;  // the element twice: a broadcast of 32 bits costs no arithmetic port, one of 16 does
    static constexpr int kWidth = 32;
    static constexpr bool kHalf = true;
    static constexpr float kLowest = -60000.0f;

    static __m512h load_elements(const _Float16* p) { return _mm512_loadu_ph(p); }
    static void store_elements(_Float16* p, __m512h v) { _mm512_storeu_ph(p, v); }
    static __m512h broadcast(const uint32_t* p) { return _mm512_castsi512_ph(_mm512_set1_epi32(int(*p))); }
    static __m512h multiply_add(__m512h a, __m512h b, __m512h c) { return _mm512_fmadd_ph(a, b, c); }
    static __m512h largest(__m512h v, __m512h top) { return _mm512_max_ph(v, top); }
    static __m512h all(float x) { return _mm512_set1_ph(_Float16(x)); }
    static __m256i halves(Vec x) { return _mm256_castph_si256(_mm512_cvtxps_ph(__m512(x))); }

    static void pack(Vec x, uint32_t* to) {
        const __m512i h = _mm512_cvtepu16_epi32(halves(x));
        _mm512_storeu_si512(to, _mm512_or_si512(h, _mm512_slli_epi32(h, 16)));
    }

    // 2^x for x <= 0, to half precision.
    static __m512h exp2(__m512h x) {
        x = _mm512_max_ph(all(-26.0f), x);
        const __m512h r = _mm512_reduce_ph(x, 0x00);  // x - round(x)
        const __m512h n = _mm512_sub_ph(x, r);
        __m512h p = _mm512_fmadd_ph(all(0.0555041f), r, all(0.2402265f));
        p = _mm512_fmadd_ph(p, r, all(0.6931472f));
        p = _mm512_fmadd_ph(p, r, all(1.0f));
        return _mm512_scalef_ph(p, n);
    }

    static __m512h narrow(const float* p) {
        const __m512i low = _mm512_castsi256_si512(halves(load(p)));
        return _mm512_castsi512_ph(_mm512_inserti64x4(low, halves(load(p + 16)), 1));
    }

    static void widen(__m512h v, Vec* to) {
        const __m512i bits = _mm512_castph_si512(v);
        to[0] = Vec(_mm512_cvtxph_ps(_mm256_castsi256_ph(_mm512_castsi512_si256(bits))));
        to[1] = Vec(_mm512_cvtxph_ps(_mm256_castsi256_ph(_mm512_extracti64x4_epi64(bits, 1))));
    }

    static __m512h hide(__m512h s, const int16_t* first, const int16_t* last, int key) {
        const __m512i k = _mm512_set1_epi16(int16_t(key));
        const __mmask32 seen = _mm512_cmple_epi16_mask(_mm512_loadu_si512(first), k) &
                               _mm512_cmpge_epi16_mask(_mm512_loadu_si512(last), k);
        const __m512i hidden = _mm512_castph_si512(all(-INFINITY));
        return _mm512_castsi512_ph(_mm512_mask_mov_epi16(hidden, seen, _mm512_castph_si512(s)));
    }
};
#endif

// sum[i][c] += a[i * a_row + s * a_step] (broadcast) * b[s * kSubRows + c] over `steps` values of s.
template <class M, int C>
static inline __attribute__((always_inline)) void add_products(const typename M::Packed* a, int a_row, int a_step,
                                                               const typename M::Element* b, int steps,
                                                               typename M::Vector (&sum)[kBlockKeys][C]) {
    for (int s = 0; s < steps; s++) {
        typename M::Vector x[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) x[c] = M::load_elements(b + s * kSubRows + c * M::kWidth);
#pragma GCC unroll 8
        for (int i = 0; i < kBlockKeys; i++) {
            const typename M::Vector y = M::broadcast(a + i * a_row + s * a_step);
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) sum[i][c] = M::multiply_add(x[c], y, sum[i][c]);
        }
    }
}

// What a tile of many rows works on, kept by its thread.
template <int D>
struct ManyRows {
    static constexpr int kSubs = (kMaxRows + kSubRows - 1) / kSubRows;
    alignas(64) float query[kSubs][D][kSubRows];  // times scale * log2(e)
    alignas(64) float acc[kSubs][D][kSubRows];
    alignas(64) float maximum[kSubs][kSubRows];  // in units of log2, of scores less that of `mean`
    alignas(64) float sum[kSubs][kSubRows];
    alignas(64) float keys[kManyKeys * D], values[kManyKeys * D];
    alignas(64) float scores[kManyKeys * kSubRows];
    alignas(64) float mean[D];
    alignas(64) float largest_query[kSubs][D];
    alignas(64) float largest_key[D];
    float largest_value;
#ifdef TURNKEEP_FP16
    alignas(64) uint32_t half_keys[kManyKeys * D], half_values[kManyKeys * D];
    alignas(64) _Float16 half_query[kSubs][D][kSubRows];
    alignas(64) _Float16 half_scores[kManyKeys * kSubRows];
#endif

    static ManyRows& of_thread() {
        thread_local std::unique_ptr<ManyRows> rows(new ManyRows);
        return *rows;
    }
};

// Rows [row, row + rows) of a chunk of `keys` keys that begins at `begin`, what each may see of it, and whether any sees but a part.
struct Edges {
    alignas(64) int16_t first[kSubRows], last[kSubRows];
    bool any, none;

    Edges(const AttentionArgs& a, const Tile& t, int row, int rows, int begin, int keys) {
        const Visible nearest = visible(a, t, row), furthest = visible(a, t, row + rows - 1);
        none = furthest.last < begin || nearest.first >= begin + keys;
        any = nearest.last < begin + keys - 1 || furthest.first > begin;
        if (none || !any) return;
        for (int r = 0; r < kSubRows; r++) {
            const Visible v = visible(a, t, row + std::min(r, rows - 1));
            first[r] = int16_t(std::clamp(v.first - begin, 0, keys));
            last[r] = int16_t(std::clamp(v.last - begin, -1, keys - 1));
        }
    }
};

// C vectors of rows: scores of a chunk, [key][row], and the largest of them.
template <class M, int D, int C>
static inline void score(const typename M::Packed* keys, int count, const typename M::Element* query, const Edges& edges, int row,
                         typename M::Element* scores, typename M::Vector* tops) {
    using V = typename M::Vector;
    constexpr int kRun = !M::kHalf ? D : D % 32 ? 16 : 32;
    V top[C];
    for (int c = 0; c < C; c++) top[c] = M::all(-INFINITY);
    for (int k = 0; k < count; k += kBlockKeys) {
        for (int d = 0; d < D; d += kRun) {
            V sum[kBlockKeys][C];
            for (int i = 0; i < kBlockKeys; i++)
                for (int c = 0; c < C; c++) sum[i][c] = M::all(0.0f);
            add_products<M, C>(keys + k * D + d, D, 1, query + d * kSubRows, kRun, sum);
#pragma GCC unroll 8
            for (int i = 0; i < kBlockKeys; i++) {
#pragma GCC unroll 8
                for (int c = 0; c < C; c++) {
                    typename M::Element* to = scores + (k + i) * kSubRows + c * M::kWidth;
                    V v = sum[i][c];
                    if (d > 0) v = v + M::load_elements(to);
                    if (d + kRun == D) {
                        if (edges.any) v = M::hide(v, edges.first + row + c * M::kWidth, edges.last + row + c * M::kWidth, k + i);
                        top[c] = M::largest(v, top[c]);
                    }
                    M::store_elements(to, v);
                }
            }
        }
    }
    for (int c = 0; c < C; c++) tops[c] = top[c];
}

// One vector of rows: scores become probabilities under the new maximum. Returns by `shrink` what the rows' past is worth now.
template <class M>
static inline void normalise(typename M::Element* scores, int count, typename M::Vector top, float* maximum, float* sum,
                             float* shrink) {
    using V = typename M::Vector;
    constexpr int kParts = M::kWidth / kLanes;
    alignas(64) float reference[M::kWidth];
    Vec wide[kParts], total[kParts];
    M::widen(top, wide);
    for (int i = 0; i < kParts; i++) {
        const Vec highest = vmax(load(maximum + i * kLanes), wide[i]);
        store(reference + i * kLanes, vmax(highest, splat(M::kLowest)));
        total[i] = splat(0.0f);
    }
    const V shift = M::narrow(reference);  // whatever rounding makes of the maximum is what scores are taken from
    constexpr int kRun = 16;
    for (int k = 0; k < count; k += kRun) {
        V run = M::all(0.0f);
        for (int i = k; i < std::min(k + kRun, count); i++) {
            typename M::Element* s = scores + i * kSubRows;
            const V p = M::exp2(M::load_elements(s) - shift);
            M::store_elements(s, p);
            run = run + p;
        }
        Vec more[kParts];
        M::widen(run, more);
        for (int i = 0; i < kParts; i++) total[i] += more[i];
    }
    M::widen(shift, wide);
    for (int i = 0; i < kParts; i++) {
        const Vec factor = exp2_nonpositive(load(maximum + i * kLanes) - wide[i]);
        store(shrink + i * kLanes, factor);
        store(sum + i * kLanes, load(sum + i * kLanes) * factor + total[i]);
        store(maximum + i * kLanes, wide[i]);
    }
}

// C vectors of rows: acc = acc * shrink + probabilities times values.
template <class M, int D, int C>
static inline void gather(const typename M::Packed* values, int count, const typename M::Element* scores, const float* shrink,
                          float* acc) {
    constexpr int kParts = M::kWidth / kLanes;
    for (int d = 0; d < D; d += kBlockKeys) {
        typename M::Vector sum[kBlockKeys][C];
        for (int i = 0; i < kBlockKeys; i++)
            for (int c = 0; c < C; c++) sum[i][c] = M::all(0.0f);
        add_products<M, C>(values + d, 1, D, scores, count, sum);
#pragma GCC unroll 8
        for (int i = 0; i < kBlockKeys; i++) {
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) {
                Vec wide[kParts];
                M::widen(sum[i][c], wide);
                for (int p = 0; p < kParts; p++) {
                    const int row = c * M::kWidth + p * kLanes;
                    float* to = acc + (d + i) * kSubRows + row;
                    store(to, load(to) * load(shrink + row) + wide[p]);
                }
            }
        }
    }
}

// Rows of one sub-tile against one chunk.
template <class M, int D>
static void attend_chunk(const typename M::Packed* keys, const typename M::Packed* values, int count,
                         const typename M::Element* query, int rows, const Edges& edges, typename M::Element* scores,
                         float* maximum, float* sum, float* acc) {
    alignas(64) float shrink[kSubRows];
    const int vectors = (rows + M::kWidth - 1) / M::kWidth;
    typename M::Vector tops[kSubRows / M::kWidth];
    const auto in_groups = [&](const auto& wide, const auto& narrow) {
        int v = 0;
        for (; v + kBlockVectors <= vectors; v += kBlockVectors) wide(v);
        for (; v < vectors; v++) narrow(v);
    };
    in_groups(
        [&](int v) {
            const int r = v * M::kWidth;
            score<M, D, kBlockVectors>(keys, count, query + r, edges, r, scores + r, tops + v);
        },
        [&](int v) {
            const int r = v * M::kWidth;
            score<M, D, 1>(keys, count, query + r, edges, r, scores + r, tops + v);
        });
    for (int v = 0; v < vectors; v++) {
        const int r = v * M::kWidth;
        normalise<M>(scores + r, count, tops[v], maximum + r, sum + r, shrink + r);
    }
    in_groups(
        [&](int v) {
            const int r = v * M::kWidth;
            gather<M, D, kBlockVectors>(values, count, scores + r, shrink + r, acc + r);
        },
        [&](int v) {
            const int r = v * M::kWidth;
            gather<M, D, 1>(values, count, scores + r, shrink + r, acc + r);
        });
}

template <class M, class T, int D>
static inline void pack_chunk(const AttentionArgs& a, const Tile& t, int begin, int keys, int padded, ManyRows<D>& w,
                              typename M::Packed* packed_keys, typename M::Packed* packed_values) {
    Vec mean[D / kLanes], largest_key[D / kLanes], largest_value = splat(0.0f);
    for (int d = 0; d < D / kLanes; d++) {
        mean[d] = load(w.mean + d * kLanes);
        largest_key[d] = splat(0.0f);
    }
    for_keys<T, D>(a, t, begin, keys, [&](int j, const T* k, const T* v, float k_scale, float v_scale) {
        for (int d = 0; d < D / kLanes; d++) {
            Vec x = load(k + d * kLanes), y = load(v + d * kLanes);
            if constexpr (std::is_same_v<T, Int8>) {
                x *= k_scale;
                y *= v_scale;
            }
            x -= mean[d];
            if constexpr (M::kHalf) {
                largest_key[d] = vmax(vabs(x), largest_key[d]);
                largest_value = vmax(vabs(y), largest_value);
            }
            M::pack(x, packed_keys + j * D + d * kLanes);
            M::pack(y, packed_values + j * D + d * kLanes);
        }
    });
    for (int j = keys * D; j < padded * D; j += kLanes) {
        M::pack(splat(0.0f), packed_keys + j);
        M::pack(splat(0.0f), packed_values + j);
    }
    if constexpr (M::kHalf) {
        for (int d = 0; d < D / kLanes; d++) store(w.largest_key + d * kLanes, largest_key[d]);
        w.largest_value = max_lane(largest_value);
    }
}

// The mean of the tile's first keys, 0 in dims where it is not finite.
template <class T, int D>
static inline void mean_of_first_keys(const AttentionArgs& a, const Tile& t, float* mean) {
    const int keys = std::min(kManyKeys, t.key_end - t.key_begin);
    Vec sum[D / kLanes] = {};
    for_keys<T, D>(a, t, t.key_begin, keys, [&](int, const T* k, const T*, float scale, float) {
        for (int d = 0; d < D / kLanes; d++) sum[d] += load(k + d * kLanes) * scale;
    });
    for (int d = 0; d < D / kLanes; d++) store(mean + d * kLanes, sum[d] / float(keys));
    for (int d = 0; d < D; d++)
        if (!std::isfinite(mean[d])) mean[d] = 0.0f;
}

#ifdef TURNKEEP_FP16
// Whether no sum of a sub-tile over the packed chunk can leave the range of half precision, which ends at 65504. Keys beyond 4096
// are left to float32 as well: what gives them scores of a common size are queries so small that half precision has few bits left.
template <int D>
static inline bool fits_half(const ManyRows<D>& w, int sub) {
    constexpr float kRange = 30000.0f, kLargestKey = 4096.0f;
    float bound = 0, key = 0;
    for (int d = 0; d < D; d++) {
        bound += w.largest_query[sub][d] * w.largest_key[d];
        key = std::max(key, w.largest_key[d]);
    }
    return bound < kRange && key < kLargestKey && w.largest_value * kManyKeys < kRange;
}
#endif

template <class T, int D>
static void tile_many_rows(const AttentionArgs& a, const Tile& t, Rows& state) {
#ifdef TURNKEEP_FP16
    constexpr bool kHalf = !std::is_same_v<T, float>;
#else
    constexpr bool kHalf = false;
#endif
    ManyRows<D>& w = ManyRows<D>::of_thread();
    const float scale = a.scale * kLog2E;
    const int subs = (t.rows + kSubRows - 1) / kSubRows;
    for (int r = 0; r < subs * kSubRows; r++) {
        const IoOf<T>* q = query_row<T>(a, t, t.row + std::min(r, t.rows - 1));
        alignas(64) float row[D];
        for (int d = 0; d < D; d += kLanes) store(row + d, load(q + d) * scale);
        for (int d = 0; d < D; d++) w.query[r / kSubRows][d][r % kSubRows] = row[d];
    }
    std::fill(&w.acc[0][0][0], &w.acc[0][0][0] + subs * D * kSubRows, 0.0f);
    std::fill(&w.maximum[0][0], &w.maximum[0][0] + subs * kSubRows, kNegative);
    std::fill(&w.sum[0][0], &w.sum[0][0] + subs * kSubRows, 0.0f);
    std::fill(w.mean, w.mean + D, 0.0f);
#ifdef TURNKEEP_FP16
    if constexpr (kHalf) {
        mean_of_first_keys<T, D>(a, t, w.mean);
        for (int s = 0; s < subs; s++)
            for (int d = 0; d < D; d++) {
                Vec top = splat(0.0f);
                for (int r = 0; r < kSubRows; r += Half::kWidth)
                    Half::store_elements(&w.half_query[s][d][r], Half::narrow(&w.query[s][d][r]));
                for (int r = 0; r < kSubRows; r += kLanes) top = vmax(vabs(load(&w.query[s][d][r])), top);
                w.largest_query[s][d] = max_lane(top);
            }
    }
#endif
    for (int begin = t.key_begin; begin < t.key_end; begin += kManyKeys) {
        const int keys = std::min(kManyKeys, t.key_end - begin);
        const int padded = (keys + kBlockKeys - 1) / kBlockKeys * kBlockKeys;
        bool wide = false;  // whether the chunk is packed in float32
#ifdef TURNKEEP_FP16
        if constexpr (kHalf) pack_chunk<Half, T, D>(a, t, begin, keys, padded, w, w.half_keys, w.half_values);
#endif
        for (int s = 0; s < subs; s++) {
            const int rows = std::min(kSubRows, t.rows - s * kSubRows);
            const Edges edges(a, t, t.row + s * kSubRows, rows, begin, keys);
            if (edges.none) continue;
            Edges padding = edges;
            if (padded > keys && !edges.any) {  // keys that are not there are hidden like those that may not be seen
                padding.any = true;
                std::fill(padding.first, padding.first + kSubRows, int16_t(0));
                std::fill(padding.last, padding.last + kSubRows, int16_t(keys - 1));
            }
#ifdef TURNKEEP_FP16
            if constexpr (kHalf) {
                if (fits_half(w, s)) {
                    attend_chunk<Half, D>(w.half_keys, w.half_values, padded, &w.half_query[s][0][0], rows, padding, w.half_scores,
                                          w.maximum[s], w.sum[s], &w.acc[s][0][0]);
                    continue;
                }
            }
#endif
            if (!wide) pack_chunk<Single, T, D>(a, t, begin, keys, padded, w, w.keys, w.values);
            wide = true;
            attend_chunk<Single, D>(w.keys, w.values, padded, &w.query[s][0][0], rows, padding, w.scores, w.maximum[s], w.sum[s],
                                    &w.acc[s][0][0]);
        }
    }
    for (int r = 0; r < t.rows; r++) {
        const int s = r / kSubRows, i = r % kSubRows;
        float shift = 0;
        if (kHalf && t.partial)  // parts have means of their own
            for (int d = 0; d < D; d++) shift += w.query[s][d][i] * w.mean[d];
        state.sum[r] = w.sum[s][i];
        state.maximum[r] = (w.maximum[s][i] + shift) * kLn2;
        for (int d = 0; d < D; d++) state.acc[r * D + d] = w.acc[s][d][i];
    }
}

}  // namespace turnkeep
