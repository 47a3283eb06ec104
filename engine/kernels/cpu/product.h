// x W^T by whichever method: which there are on this machine, what each reads, and how a team shares the work.
#pragma once
#include "product_amx.h"
#include "product_fma.h"
#include "product_halves.h"
#include "product_int8.h"
#include "team.h"

namespace turnkeep {

// Mirrors engine/kernels/cpu/matrix.py.
enum Method : int32_t { kFma = 0, kHalf = 1, kDotBF16 = 2, kAmxBF16 = 3, kInt16Dot = 4, kInt8Dot = 5 };

static inline bool has_method(int64_t format, int32_t method, bool amx) {
    switch (method) {
        case kFma: return true;
#if defined(__AVX512FP16__)
        case kHalf: return format == kF16;
#endif
#if defined(__AVX512BF16__)
        case kDotBF16: return format == kBF16;
#endif
#ifdef TURNKEEP_AMX
        case kAmxBF16: return format == kBF16 && amx;
#endif
#if defined(__AVX512VNNI__)
        case kInt16Dot:
        case kInt8Dot: return format >= kCodes8;
#endif
    }
    return false;
}

static inline Kind kind_of(int32_t method) {
    switch (method) {
        case kHalf: return kHalfRows;
        case kDotBF16:
        case kAmxBF16: return kBFloatRows;
        case kInt16Dot: return kInt16Rows;
        case kInt8Dot: return kInt8Rows;
        default: return kFloatRows;
    }
}

// Rows [row, row + rows) of x times a block of W: c [rows][32]. The rows are a tile of the operand; on AMX, any up to 32.
static __attribute__((noinline)) void product_tile(const Matrix& w, int32_t method, const Operand& x, int row, int rows, int64_t block, float* c,
                                                   Ahead ahead) {
    switch (method) {
#if defined(__AVX512FP16__)
        case kHalf: return tile_half(w, x, row, rows, block, c, ahead);
#endif
#if defined(__AVX512BF16__)
        case kDotBF16: return tile_bf16(w, x, row, rows, block, c);
#endif
#ifdef TURNKEEP_AMX
        case kAmxBF16: return tile_amx_bf16(w, x, row, rows, block, c);
#endif
#if defined(__AVX512VNNI__)
        case kInt16Dot: return tile_int16(w, x, row, rows, block, c);
        case kInt8Dot: return tile_int8(w, x, row, rows, block, c, ahead);
#endif
        default: return tile_fma(w, x, row, rows, block, c);
    }
}

constexpr int kRowChunk = 240;  // rows whose activations stay in the second-level cache while weights stream past

// `done(row, column, values)` takes each row's 32 results. Crew: a Team within a pass, or one thread Alone.
template <class Crew, class Done>
static inline void multiply(Crew& team, const Matrix& w, int32_t method, const Operand& x, const Done& done) {
    const int m = x.rows;
    const int chunk_rows = method == kAmxBF16 ? 256 : kRowChunk;
    const int64_t blocks = (w.n + kBlock - 1) / kBlock, chunks = (m + chunk_rows - 1) / chunk_rows;
    // Blocks a thread takes at once: some microseconds of weights, and no more than leaves the others enough.
    const int64_t enough = std::max<int64_t>(1, 32768 / (2 * panel_bytes(w.format, w.k)));
    const int64_t grain = m <= 32 ? std::max<int64_t>(1, std::min<int64_t>(enough, blocks / (8 * team.size()))) : 1;
    const int64_t groups = (blocks + grain - 1) / grain;
    team.run(chunks * groups, [&](int64_t i) {
        alignas(64) float c[32 * kBlock];
        const int begin = int(i / groups) * chunk_rows, end = std::min(m, begin + chunk_rows);
        const int64_t last = std::min(blocks, (i % groups + 1) * grain);
        for (int64_t b = i % groups * grain; b < last; b++) {
            const int64_t next = 2 * panel_bytes(w.format, w.k) / (end - begin);  // of the next block, bytes for each row of this
            const char* ahead = panel_of(w, 2 * (b + 1 < last ? b + 1 : b + 1 + (team.size() - 1) * grain));
            for (int r = begin; r < end;) {
                const int tile = method == kAmxBF16 ? std::min(32, end - r) : tile_rows(x.kind, m - r);
                const int rows = std::min(tile, end - r);
                product_tile(w, method, x, r, tile, b, c, {ahead + (r - begin) * next, rows * next});
                for (int j = 0; j < rows; j++) done(r + j, int(b) * kBlock, c + j * kBlock);
                r += rows;
            }
        }
    });
}

// Mirrors engine/kernels/cpu/matrix.py.
struct MultiplyArgs {
    Matrix matrix;
    const float* x;
    float* out;
    void* team;
    int64_t rows;
    int64_t method;
};

// One product by itself, for tests and for measuring what a method costs.
static inline void multiply_rows(const MultiplyArgs& a) {
    Team& team = *static_cast<Team*>(a.team);
    const Matrix& w = a.matrix;
    Team::Pass pass(team);
    Arena arena(team.memory(operand_bytes(a.rows, w.k)));
    const Operand x = new_operand(arena, w, kind_of(int32_t(a.method)), int(a.rows));
    team.run((a.rows + 3) / 4, [&](int64_t i) {
        for (int64_t r = i * 4; r < std::min(a.rows, i * 4 + 4); r++) put_row(x, int(r), a.x + r * w.k);
    });
    multiply(team, w, int32_t(a.method), x, [&](int row, int column, const float* c) {
        memcpy(a.out + row * w.n + column, c, std::min<int64_t>(kBlock, w.n - column) * sizeof(float));
    });
}

}  // namespace turnkeep
