// Products of float16 (AVX512-FP16) and of bfloat16 pairs (AVX512-BF16).
#pragma once
#include "operand.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace turnkeep {

#if defined(__AVX512FP16__)

// Twice the rate of float32. Each lane sums at most kHalfRun products in float16, then joins a float32 sum: the error of the sum
// stays below that of rounding the operands to bfloat16. Lanes are (column, even or odd input).
constexpr int64_t kHalfRun = 96;

template <int M>
static __attribute__((noinline)) void half_run(const char* left, const char* right, const char* x, int64_t stride, int64_t pairs,
                                               bool first, __m512* sums, const char* ahead, int64_t step) {
    __m512h acc[M][2];
#pragma GCC unroll 12
    for (int r = 0; r < M; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ph();
    for (int64_t k = 0; k < pairs; k += 4, ahead += step) {
        _mm_prefetch(ahead, _MM_HINT_T1);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++, left += 64, right += 64, x += 4) {
            _mm_prefetch(left + kAhead, _MM_HINT_T0);
            _mm_prefetch(right + kAhead, _MM_HINT_T0);
            const __m512h a = _mm512_castsi512_ph(_mm512_loadu_si512(left)), b = _mm512_castsi512_ph(_mm512_loadu_si512(right));
#pragma GCC unroll 12
            for (int r = 0; r < M; r++) {
                int32_t pair;
                memcpy(&pair, x + r * stride, 4);
                const __m512h value = _mm512_castsi512_ph(_mm512_set1_epi32(pair));
                acc[r][0] = _mm512_fmadd_ph(a, value, acc[r][0]);
                acc[r][1] = _mm512_fmadd_ph(b, value, acc[r][1]);
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < M; r++)
#pragma GCC unroll 2
        for (int p = 0; p < 2; p++) {
            const __m512i bits = _mm512_castph_si512(acc[r][p]);
            const __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(bits)), high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1));
            __m512* to = sums + (r * 2 + p) * 2;
            to[0] = first ? low : _mm512_add_ps(to[0], low);
            to[1] = first ? high : _mm512_add_ps(to[1], high);
        }
}

template <int M>
static void tile_half_rows(const Matrix& w, const char* x, int64_t stride, int64_t block, float* c, Ahead ahead) {
    __m512 sums[M * 4];
    const char *left = panel_of(w, block * 2), *right = panel_of(w, block * 2 + 1);
    const int64_t pairs = w.k / 2, step = ahead.bytes * 4 / pairs;
    for (int64_t begin = 0; begin < pairs; begin += kHalfRun)
        half_run<M>(left + begin * 64, right + begin * 64, x + begin * 4, stride, std::min(kHalfRun, pairs - begin), begin == 0, sums,
                    ahead.at + begin / 4 * step, step);
    const __m512i evens = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odds = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    for (int r = 0; r < M; r++)
        for (int p = 0; p < 2; p++) {
            const __m512 low = sums[(r * 2 + p) * 2], high = sums[(r * 2 + p) * 2 + 1];
            const __m512 sum = _mm512_add_ps(_mm512_permutex2var_ps(low, evens, high), _mm512_permutex2var_ps(low, odds, high));
            _mm512_storeu_ps(c + r * kBlock + p * kPanel, sum);
        }
}

static void tile_half(const Matrix& w, const Operand& x, int row, int rows, int64_t block, float* c, Ahead ahead) {
    const char* from = x.data + row * x.stride;
    switch (rows) {
        case 1: tile_half_rows<1>(w, from, x.stride, block, c, ahead); break;
        case 2: tile_half_rows<2>(w, from, x.stride, block, c, ahead); break;
        case 4: tile_half_rows<4>(w, from, x.stride, block, c, ahead); break;
        case 8: tile_half_rows<8>(w, from, x.stride, block, c, ahead); break;
        default: tile_half_rows<12>(w, from, x.stride, block, c, ahead); break;
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < kBlock; i += kLanes)
            store(c + r * kBlock + i, load(c + r * kBlock + i) * x.scale[row + r]);
}
#endif

#if defined(__AVX512BF16__)

template <int M>
static void tile_bf16_rows(const Matrix& w, const char* x, int64_t stride, int64_t block, float* c) {
    const char *left = panel_of(w, block * 2), *right = panel_of(w, block * 2 + 1);
    __m512 acc[M][2];
#pragma GCC unroll 12
    for (int r = 0; r < M; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < w.k / 2; k++) {
        const __m512bh a = (__m512bh)_mm512_loadu_si512(left + k * 64), b = (__m512bh)_mm512_loadu_si512(right + k * 64);
#pragma GCC unroll 12
        for (int r = 0; r < M; r++) {
            int32_t pair;
            memcpy(&pair, x + r * stride + k * 4, 4);
            const __m512bh value = (__m512bh)_mm512_set1_epi32(pair);
            acc[r][0] = _mm512_dpbf16_ps(acc[r][0], a, value);
            acc[r][1] = _mm512_dpbf16_ps(acc[r][1], b, value);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < M; r++) {
        _mm512_storeu_ps(c + r * kBlock, acc[r][0]);
        _mm512_storeu_ps(c + r * kBlock + kPanel, acc[r][1]);
    }
}

static void tile_bf16(const Matrix& w, const Operand& x, int row, int rows, int64_t block, float* c) {
    const char* from = x.data + row * x.stride;
    switch (rows) {
        case 1: return tile_bf16_rows<1>(w, from, x.stride, block, c);
        case 2: return tile_bf16_rows<2>(w, from, x.stride, block, c);
        case 4: return tile_bf16_rows<4>(w, from, x.stride, block, c);
        case 8: return tile_bf16_rows<8>(w, from, x.stride, block, c);
        default: return tile_bf16_rows<12>(w, from, x.stride, block, c);
    }
}
#endif

}  // namespace turnkeep
