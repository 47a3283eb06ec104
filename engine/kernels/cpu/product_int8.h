// Products of unsigned codes with signed activations, four at a time (AVX512-VNNI). Activations have 8 bits (kInt8Rows), or 16 as two
// bytes (kInt16Rows): two products instead of one, and as good as float activations; where memory is the limit they are free.
#pragma once
#include "operand.h"

#if defined(__AVX512VNNI__)
#include <immintrin.h>

namespace turnkeep {

// One step of 4 inputs: acc += (a, b) * x, for M rows. Accumulators are named by constants only, so that they stay in registers.
template <int M>
static inline __attribute__((always_inline)) void dot_step(__m512i a, __m512i b, const char* x, int64_t stride, __m512i (&acc)[M][2]) {
#pragma GCC unroll 12
    for (int r = 0; r < M; r++) {
        int32_t four;
        memcpy(&four, x + r * stride, 4);
        const __m512i value = _mm512_set1_epi32(four);
        acc[r][0] = _mm512_dpbusd_epi32(acc[r][0], a, value);
        acc[r][1] = _mm512_dpbusd_epi32(acc[r][1], b, value);
    }
}

template <int M>
static inline __attribute__((always_inline)) void clear(__m512i (&acc)[M][2]) {
#pragma GCC unroll 12
    for (int r = 0; r < M; r++) acc[r][0] = acc[r][1] = _mm512_setzero_si512();
}

template <int M>
static inline __attribute__((always_inline)) void keep(const __m512i (&acc)[M][2], __m512i* out) {
#pragma GCC unroll 12
    for (int r = 0; r < M; r++) {
        out[r * 2] = acc[r][0];
        out[r * 2 + 1] = acc[r][1];
    }
}

// Codes of 8 bits: `steps` steps of 4 inputs. out: [M][2]. A function of its own, not inlined: the compiler then keeps all
// accumulators in registers.
template <int M>
static __attribute__((noinline)) void dot_run(const char* left, const char* right, const char* x, int64_t stride, int64_t steps, __m512i* out) {
    __m512i acc[M][2];
    clear<M>(acc);
#pragma GCC unroll 4
    for (int64_t s = 0; s < steps; s++, left += 64, right += 64, x += 4) {
        _mm_prefetch(left + kAhead, _MM_HINT_T0);
        _mm_prefetch(right + kAhead, _MM_HINT_T0);
        dot_step<M>(_mm512_loadu_si512(left), _mm512_loadu_si512(right), x, stride, acc);
    }
    keep<M>(acc, out);
}

// Activations of 16 bits: both bytes against the same weights. high, low: [M][2].
template <int M>
static __attribute__((noinline)) void dot_run_wide(const char* left, const char* right, const char* x, const char* x_low, int64_t stride, int64_t steps,
                                                   __m512i* high_out, __m512i* low_out) {
    __m512i high[M][2], low[M][2];
    clear<M>(high);
    clear<M>(low);
#pragma GCC unroll 4
    for (int64_t s = 0; s < steps; s++, left += 64, right += 64, x += 4, x_low += 4) {
        _mm_prefetch(left + kAhead, _MM_HINT_T0);
        _mm_prefetch(right + kAhead, _MM_HINT_T0);
        const __m512i a = _mm512_loadu_si512(left), b = _mm512_loadu_si512(right);
        dot_step<M>(a, b, x, stride, high);
        dot_step<M>(a, b, x_low, stride, low);
    }
    keep<M>(high, high_out);
    keep<M>(low, low_out);
}

// One group of 32 codes of 4 bits.
template <int M>
static __attribute__((noinline)) void dot_nibbles(const char* left, const char* right, const char* x, int64_t stride, __m512i* out) {
    const __m512i mask = _mm512_set1_epi8(0x0f);
    __m512i acc[M][2];
    clear<M>(acc);
#pragma GCC unroll 4
    for (int s = 0; s < 4; s++, left += 64, right += 64, x += 4) {
        _mm_prefetch(left + kAhead, _MM_HINT_T0);
        _mm_prefetch(right + kAhead, _MM_HINT_T0);
        const __m512i a = _mm512_loadu_si512(left), b = _mm512_loadu_si512(right);
        dot_step<M>(_mm512_and_si512(a, mask), _mm512_and_si512(b, mask), x, stride, acc);
        dot_step<M>(_mm512_and_si512(_mm512_srli_epi16(a, 4), mask), _mm512_and_si512(_mm512_srli_epi16(b, 4), mask), x + 16, stride, acc);
    }
    keep<M>(acc, out);
}

template <int M>
static __attribute__((noinline)) void dot_nibbles_wide(const char* left, const char* right, const char* x, const char* x_low, int64_t stride,
                                                       __m512i* high_out, __m512i* low_out) {
    const __m512i mask = _mm512_set1_epi8(0x0f);
    __m512i high[M][2], low[M][2];
    clear<M>(high);
    clear<M>(low);
#pragma GCC unroll 4
    for (int s = 0; s < 4; s++, left += 64, right += 64, x += 4, x_low += 4) {
        _mm_prefetch(left + kAhead, _MM_HINT_T0);
        _mm_prefetch(right + kAhead, _MM_HINT_T0);
        const __m512i a = _mm512_loadu_si512(left), b = _mm512_loadu_si512(right);
        const __m512i a_low = _mm512_and_si512(a, mask), b_low = _mm512_and_si512(b, mask);
        dot_step<M>(a_low, b_low, x, stride, high);
        dot_step<M>(a_low, b_low, x_low, stride, low);
        const __m512i a_high = _mm512_and_si512(_mm512_srli_epi16(a, 4), mask), b_high = _mm512_and_si512(_mm512_srli_epi16(b, 4), mask);
        dot_step<M>(a_high, b_high, x + 16, stride, high);
        dot_step<M>(a_high, b_high, x_low + 16, stride, low);
    }
    keep<M>(high, high_out);
    keep<M>(low, low_out);
}

template <int M>
static void int8_rows(const Matrix& w, const Operand& x, int row, int64_t block, float* c) {
    const char *left = panel_of(w, block * 2), *right = panel_of(w, block * 2 + 1);
    const char* from = x.data + row * x.stride;
    const int64_t groups = (x.padded + kScaleGroup - 1) / kScaleGroup;
    alignas(64) float total[M][2][16];
    __m512i acc[M * 2];
    for (int64_t g = 0; g < groups; g++) {
        const int64_t begin = g * kScaleGroup, end = std::min(x.padded, begin + kScaleGroup);
        dot_run<M>(left + begin * kPanel, right + begin * kPanel, from + begin, x.stride, (end - begin) / 4, acc);
        for (int r = 0; r < M; r++) {
            const __m512 scale = _mm512_set1_ps(x.scale[(row + r) * groups + g]);
            const __m512i zero = _mm512_set1_epi32(128 * x.sums[(row + r) * groups + g]);
            for (int p = 0; p < 2; p++) {
                const __m512 value = _mm512_cvtepi32_ps(_mm512_sub_epi32(acc[r * 2 + p], zero));
                _mm512_store_ps(total[r][p], g ? _mm512_fmadd_ps(value, scale, _mm512_load_ps(total[r][p])) : _mm512_mul_ps(value, scale));
            }
        }
    }
    for (int r = 0; r < M; r++)
        for (int p = 0; p < 2; p++)
            _mm512_storeu_ps(c + r * kBlock + p * kPanel,
                             _mm512_mul_ps(_mm512_load_ps(total[r][p]), _mm512_loadu_ps(w.scale + block * kBlock + p * kPanel)));
}

template <int M>
static void int16_rows(const Matrix& w, const Operand& x, int row, int64_t block, float* c) {
    __m512i high[M * 2], low[M * 2];
    dot_run_wide<M>(panel_of(w, block * 2), panel_of(w, block * 2 + 1), x.data + row * x.stride, x.low + row * x.stride,
                    x.stride, x.padded / 4,
                    high, low);
    for (int r = 0; r < M; r++) {
        const __m512i zero = _mm512_set1_epi32(128 * x.sums[row + r]), low_zero = _mm512_set1_epi32(128 * x.low_sums[row + r]);
        for (int p = 0; p < 2; p++) {
            const __m512 upper = _mm512_cvtepi32_ps(_mm512_sub_epi32(high[r * 2 + p], zero));
            const __m512 lower = _mm512_cvtepi32_ps(_mm512_sub_epi32(low[r * 2 + p], low_zero));
            const __m512 value = _mm512_fmadd_ps(upper, _mm512_set1_ps(256.0f), lower);
            const __m512 scale = _mm512_mul_ps(_mm512_loadu_ps(w.scale + block * kBlock + p * kPanel), _mm512_set1_ps(x.scale[row + r]));
            _mm512_storeu_ps(c + r * kBlock + p * kPanel, _mm512_mul_ps(value, scale));
        }
    }
}

static inline __m512 half_row(const char* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

// Grouped codes: c = sum over groups of scale_g * (codes . x) + minimum_g * sum(x), with activations of 8 or 16 bits.
template <int M, int Bits, bool Wide>
static void group_rows(const Matrix& w, const Operand& x, int row, int64_t block, float* c) {
    constexpr int64_t kCodes = kGroup * kPanel * Bits / 8;
    const char *left = panel_of(w, block * 2), *right = panel_of(w, block * 2 + 1);
    const char *upper = x.data + row * x.stride, *lower = Wide ? x.low + row * x.stride : nullptr;
    const int64_t groups = x.padded / kGroup, scales = (x.padded + kScaleGroup - 1) / kScaleGroup;
    alignas(64) float total[M][2][16];
    __m512i high[M * 2], low[Wide ? M * 2 : 1];
    for (int64_t g = 0; g < groups; g++) {
        const char *x_high = upper + g * kGroup, *x_low = Wide ? lower + g * kGroup : nullptr;
        if constexpr (Bits == 8 && Wide) dot_run_wide<M>(left, right, x_high, x_low, x.stride, kGroup / 4, high, low);
        if constexpr (Bits == 8 && !Wide) dot_run<M>(left, right, x_high, x.stride, kGroup / 4, high);
        if constexpr (Bits == 4 && Wide) dot_nibbles_wide<M>(left, right, x_high, x_low, x.stride, high, low);
        if constexpr (Bits == 4 && !Wide) dot_nibbles<M>(left, right, x_high, x.stride, high);
        const __m512 scale[2] = {half_row(left + kCodes), half_row(right + kCodes)};
        const __m512 minimum[2] = {half_row(left + kCodes + 32), half_row(right + kCodes + 32)};
        for (int r = 0; r < M; r++) {
            float own = x.scale[Wide ? row + r : (row + r) * scales + g * kGroup / kScaleGroup];
            float sum = float(x.sums[(row + r) * groups + g]);
            if (Wide) sum = sum * 256.0f + float(x.low_sums[(row + r) * groups + g]);
            const __m512 factor = _mm512_set1_ps(own), shift = _mm512_set1_ps(sum * own);
            for (int p = 0; p < 2; p++) {
                __m512 value = _mm512_cvtepi32_ps(high[r * 2 + p]);
                if constexpr (Wide) value = _mm512_fmadd_ps(value, _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(low[r * 2 + p]));
                const __m512 before = g ? _mm512_load_ps(total[r][p]) : _mm512_setzero_ps();
                const __m512 with_minimum = _mm512_fmadd_ps(minimum[p], shift, before);
                _mm512_store_ps(total[r][p], _mm512_fmadd_ps(_mm512_mul_ps(value, factor), scale[p], with_minimum));
            }
        }
        left += kCodes + 4 * kPanel;
        right += kCodes + 4 * kPanel;
    }
    for (int r = 0; r < M; r++)
        for (int p = 0; p < 2; p++) _mm512_storeu_ps(c + r * kBlock + p * kPanel, _mm512_load_ps(total[r][p]));
}

template <int M>
static void tile_int8_rows(const Matrix& w, const Operand& x, int row, int64_t block, float* c) {
    if (w.format == kCodes8) return int8_rows<M>(w, x, row, block, c);
    if (w.format == kCodes8Groups) return group_rows<M, 8, false>(w, x, row, block, c);
    return group_rows<M, 4, false>(w, x, row, block, c);
}

template <int M>
static void tile_int16_rows(const Matrix& w, const Operand& x, int row, int64_t block, float* c) {
    if (w.format == kCodes8) return int16_rows<M>(w, x, row, block, c);
    if (w.format == kCodes8Groups) return group_rows<M, 8, true>(w, x, row, block, c);
    return group_rows<M, 4, true>(w, x, row, block, c);
}

static void tile_int8(const Matrix& w, const Operand& x, int row, int rows, int64_t block, float* c) {
    switch (rows) {
        case 1: return tile_int8_rows<1>(w, x, row, block, c);
        case 2: return tile_int8_rows<2>(w, x, row, block, c);
        case 4: return tile_int8_rows<4>(w, x, row, block, c);
        case 8: return tile_int8_rows<8>(w, x, row, block, c);
        default: return tile_int8_rows<12>(w, x, row, block, c);
    }
}

static void tile_int16(const Matrix& w, const Operand& x, int row, int rows, int64_t block, float* c) {
    switch (rows) {
        case 1: return tile_int16_rows<1>(w, x, row, block, c);
        case 2: return tile_int16_rows<2>(w, x, row, block, c);
        default: return tile_int16_rows<4>(w, x, row, block, c);
    }
}

}  // namespace turnkeep
#endif
