// Products on Intel AMX: up to 32 rows times a block of W in 16 x 16 tiles of float32.
#pragma once
#include "operand.h"
#include "tiles.h"

#ifdef TURNKEEP_AMX
namespace turnkeep {

static void tile_amx_bf16(const Matrix& w, const Operand& x, int row, int rows, int64_t block, float* c) {
    const int upper = std::min(rows, 16), lower = std::max(rows - 16, 0);
    const int64_t k = w.k;
    const char *left = panel_of(w, block * 2), *right = panel_of(w, block * 2 + 1);
    const char* from = x.data + row * x.stride;
    tile_shape().set(upper, lower);
    _tile_zero(0);
    _tile_zero(1);
    if (lower) {
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t d = 0; d < k; d += 32) {
            _tile_loadd(6, left + d * 32, 64);
            _tile_loadd(7, right + d * 32, 64);
            _tile_loadd(4, from + d * 2, x.stride);
            _tile_loadd(5, from + 16 * x.stride + d * 2, x.stride);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(2, c + 512, 128);
        _tile_stored(3, c + 528, 128);
    } else {
        for (int64_t d = 0; d < k; d += 32) {
            _tile_loadd(4, from + d * 2, x.stride);
            _tile_loadd(6, left + d * 32, 64);
            _tile_loadd(7, right + d * 32, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
    }
    _tile_stored(0, c, 128);
    _tile_stored(1, c + 16, 128);
}

}  // namespace turnkeep
#endif
