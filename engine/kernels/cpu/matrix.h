// A weight matrix packed for products, W [n, k]: panels of 16 output columns, each one run of bytes in the order in which a product
// reads them. Two panels are one block of 32 columns, the unit of work. `paired` matrices, [gate; up], alternate panels of the
// two, so that a block holds the same 16 columns of both and SiLU(gate) * up needs no second pass.
//
// format         a panel, for each ...                         W =
// kF32           input: float [16]                             as stored
// kBF16, kF16    pair of inputs: half [16][2]                  as stored
// kCodes8          4 inputs: uint8 [16][4]                       scale[column] * (code - 128)
// kCodes8Groups    32 inputs: uint8 [8][16][4], half scale [16], half minimum [16]       scale * code + minimum
// kCodes4Groups    32 inputs: nibbles [4][16][4] (low: inputs 0..15, high: 16..31), half scale [16], half minimum [16]
//
// Inputs of kCodes8 are padded to a multiple of 64 with code 128, which is zero.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace turnkeep {

enum Format : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2, kCodes8 = 3, kCodes8Groups = 4, kCodes4Groups = 5 };

constexpr int kPanel = 16;
constexpr int kBlock = 32;
constexpr int kAhead = 3072;  // bytes that a stream of weights is fetched ahead: the hardware's own prefetch stops at every page
constexpr int kGroup = 32;  // inputs that share a scale in the grouped formats

// Mirrors engine/kernels/cpu/matrix.py.
struct Matrix {
    const char* data;
    const float* scale;  // kCodes8: [n, padded to 32]
    int64_t n, k;
    int64_t format;
};

static inline int64_t padded_columns(int64_t n) { return (n + kBlock - 1) / kBlock * kBlock; }
static inline int64_t padded_inputs(int64_t format, int64_t k) { return format == kCodes8 ? (k + 63) / 64 * 64 : k; }

static inline int64_t panel_bytes(int64_t format, int64_t k) {
    switch (format) {
        case kF32: return k * kPanel * 4;
        case kBF16:
        case kF16: return k * kPanel * 2;
        case kCodes8: return padded_inputs(format, k) * kPanel;
        case kCodes8Groups: return k / kGroup * (kGroup * kPanel + 4 * kPanel);
        default: return k / kGroup * (kGroup * kPanel / 2 + 4 * kPanel);
    }
}

static inline int64_t matrix_bytes(int64_t format, int64_t n, int64_t k) { return padded_columns(n) / kPanel * panel_bytes(format, k); }

// What a tile asks the second-level cache for while it computes: a part of the block that comes next. Weights that came only when
// their own block begins would be waited for, once for every few dozen rows.
struct Ahead {
    const char* at;
    int64_t bytes;
};

// The next bytes of `ahead`, `part` of them.
static inline __attribute__((always_inline)) void ask_for_part(Ahead& ahead, int64_t part) {
    for (int64_t i = 0; i < part; i += 64) __builtin_prefetch(ahead.at + i, 0, 2);
    ahead.at += part;
}

static inline const char* panel_of(const Matrix& w, int64_t panel) { return w.data + panel * panel_bytes(w.format, w.k); }

// Mirrors engine/kernels/cpu/matrix.py. `source`: row-major; float for kF32, the bits of bfloat16 or float16 for kBF16 and kF16,
// uint8 codes otherwise. scale, minimum: [n, k / 32], of the grouped formats.
struct PackArgs {
    const void* source;
    const float* scale;
    const float* minimum;
    char* out;
    int64_t n, k, format, paired;
};

static inline void pack_matrix(const PackArgs& p) {
    const int64_t panels = padded_columns(p.n) / kPanel, half = p.n / 2;
    for (int64_t panel = 0; panel < panels; panel++) {
        const auto column = [&](int c) -> int64_t {
            if (p.paired) return panel / 2 * kPanel + c < half ? panel % 2 * half + panel / 2 * kPanel + c : -1;
            return panel * kPanel + c < p.n ? panel * kPanel + c : -1;
        };
        char* to = p.out + panel * panel_bytes(p.format, p.k);
        if (p.format == kF32) {
            const float* w = static_cast<const float*>(p.source);
            for (int64_t d = 0; d < p.k; d++)
                for (int c = 0; c < kPanel; c++, to += 4) {
                    const float value = column(c) < 0 ? 0.0f : w[column(c) * p.k + d];
                    memcpy(to, &value, 4);
                }
        } else if (p.format == kBF16 || p.format == kF16) {
            const uint16_t* w = static_cast<const uint16_t*>(p.source);
            for (int64_t d = 0; d < p.k; d += 2)
                for (int c = 0; c < kPanel; c++)
                    for (int i = 0; i < 2; i++, to += 2) {
                        const uint16_t value = column(c) < 0 ? 0 : w[column(c) * p.k + d + i];
                        memcpy(to, &value, 2);
                    }
        } else if (p.format == kCodes8) {
            const uint8_t* w = static_cast<const uint8_t*>(p.source);
            const int64_t padded = padded_inputs(p.format, p.k);
            for (int64_t d = 0; d < padded; d += 4)
                for (int c = 0; c < kPanel; c++)
                    for (int i = 0; i < 4; i++) *to++ = char(column(c) < 0 || d + i >= p.k ? 128 : w[column(c) * p.k + d + i]);
        } else {
            const uint8_t* w = static_cast<const uint8_t*>(p.source);
            const int64_t groups = p.k / kGroup;
            const auto code = [&](int c, int64_t d) -> int { return column(c) < 0 ? 0 : w[column(c) * p.k + d]; };
            for (int64_t g = 0; g < groups; g++) {
                const int64_t d = g * kGroup;
                if (p.format == kCodes8Groups) {
                    for (int step = 0; step < 8; step++)
                        for (int c = 0; c < kPanel; c++)
                            for (int i = 0; i < 4; i++) *to++ = char(code(c, d + step * 4 + i));
                } else {
                    for (int step = 0; step < 4; step++)
                        for (int c = 0; c < kPanel; c++)
                            for (int i = 0; i < 4; i++)
                                *to++ = char(code(c, d + step * 4 + i) | code(c, d + 16 + step * 4 + i) << 4);
                }
                for (const float* from : {p.scale, p.minimum})
                    for (int c = 0; c < kPanel; c++, to += 2) {
                        const Float16 value = column(c) < 0 ? Float16(0) : Float16(from[column(c) * groups + g]);
                        memcpy(to, &value, 2);
                    }
            }
        }
    }
}

}  // namespace turnkeep
