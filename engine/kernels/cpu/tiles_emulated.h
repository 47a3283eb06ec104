// AMX tile registers in software, so that tests compute what the AMX code computes on machines without AMX. Never in production: it
// is compiled in by -DTURNKEEP_EMULATE_AMX only, which only tests give. What the processor answers with a fault (a tile that is not
// configured, shapes that do not match) ends the process here.
//
// After the pseudocode of Intel's Architecture Instruction Set Extensions Reference, chapter "Intel AMX Instruction Set".
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "vectors.h"

namespace turnkeep {

class EmulatedTiles {
  public:
    // 64 bytes: palette, start row, 14 reserved, 16 x uint16 bytes a row, 16 x uint8 rows.
    void configure(const void* config) {
        const uint8_t* c = static_cast<const uint8_t*>(config);
        check(c[0] == 1, "palette is not 1");
        for (int i = 0; i < 8; i++) {
            uint16_t bytes;
            memcpy(&bytes, c + 16 + 2 * i, sizeof bytes);
            tiles_[i].rows = c[48 + i];
            tiles_[i].bytes = bytes;
            check(tiles_[i].rows <= 16 && tiles_[i].bytes <= 64, "a tile is larger than 16 rows of 64 bytes");
            memset(tiles_[i].data, 0, sizeof tiles_[i].data);
        }
    }

    void release() {
        for (Tile& t : tiles_) t.rows = t.bytes = 0;
    }

    void zero(int i) { memset(at(i).data, 0, sizeof tiles_[i].data); }

    void load(int i, const void* from, int64_t stride) {
        Tile& t = at(i);
        memset(t.data, 0, sizeof t.data);
        for (int r = 0; r < t.rows; r++) memcpy(t.data[r], static_cast<const char*>(from) + r * stride, t.bytes);
    }

    void save(int i, void* to, int64_t stride) {
        const Tile& t = at(i);
        for (int r = 0; r < t.rows; r++) memcpy(static_cast<char*>(to) + r * stride, t.data[r], t.bytes);
    }

    // c [m][n] += a [m][k][2] b [k][n][2]
    void multiply_bf16(int ci, int ai, int bi) {
        Tile &c = at(ci), &a = at(ai), &b = at(bi);
        check_shapes(c, a, b);
        for (int m = 0; m < c.rows; m++) {
            Vec sum;
            memcpy(&sum, c.data[m], sizeof sum);
            for (int k = 0; k < b.rows; k++) {
                uint32_t pair;
                memcpy(&pair, a.data[m] + 4 * k, sizeof pair);
                UVec pairs;
                memcpy(&pairs, b.data[k], sizeof pairs);
                sum += as_float(pair << 16) * as_floats(pairs << 16);
                sum += as_float(pair & 0xffff0000u) * as_floats(pairs & 0xffff0000u);
            }
            memcpy(c.data[m], &sum, c.bytes);
        }
    }

    // c [m][n] += a [m][k][4] b [k][n][4] in int32, a of type A, b of type B: int8_t or uint8_t.
    template <class A, class B>
    void multiply_int8(int ci, int ai, int bi) {
        Tile &c = at(ci), &a = at(ai), &b = at(bi);
        check_shapes(c, a, b);
        for (int m = 0; m < c.rows; m++)
            for (int n = 0; n < c.bytes / 4; n++) {
                int32_t sum;
                memcpy(&sum, c.data[m] + 4 * n, sizeof sum);
                for (int k = 0; k < b.rows; k++)
                    for (int i = 0; i < 4; i++) sum += int32_t(A(a.data[m][4 * k + i])) * int32_t(B(b.data[k][4 * n + i]));
                memcpy(c.data[m] + 4 * n, &sum, sizeof sum);
            }
    }

  private:
    struct Tile {
        alignas(64) uint8_t data[16][64];
        int rows = 0, bytes = 0;
    };

    static void check(bool holds, const char* what) {
        if (holds) return;
        fprintf(stderr, "emulated AMX: %s\n", what);
        abort();
    }

    static void check_shapes(const Tile& c, const Tile& a, const Tile& b) {
        check(c.rows == a.rows && c.bytes == b.bytes && a.bytes == 4 * b.rows, "the tiles of a product do not match");
    }

    Tile& at(int i) {
        check(i >= 0 && i < 8 && tiles_[i].rows > 0 && tiles_[i].bytes > 0, "a tile is not configured");
        return tiles_[i];
    }

    static float as_float(uint32_t bits) {
        float x;
        memcpy(&x, &bits, sizeof x);
        return x;
    }

    static Vec as_floats(UVec bits) {
        Vec x;
        memcpy(&x, &bits, sizeof x);
        return x;
    }

    Tile tiles_[8];
};

static inline EmulatedTiles& emulated_tiles() {
    thread_local EmulatedTiles tiles;
    return tiles;
}

}  // namespace turnkeep

#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbusd
#undef _tile_dpbuud
#define _tile_loadconfig(config) turnkeep::emulated_tiles().configure(config)
#define _tile_release() turnkeep::emulated_tiles().release()
#define _tile_zero(tile) turnkeep::emulated_tiles().zero(tile)
#define _tile_loadd(tile, base, stride) turnkeep::emulated_tiles().load(tile, base, stride)
#define _tile_stream_loadd(tile, base, stride) turnkeep::emulated_tiles().load(tile, base, stride)
#define _tile_stored(tile, base, stride) turnkeep::emulated_tiles().save(tile, base, stride)
#define _tile_dpbf16ps(c, a, b) turnkeep::emulated_tiles().multiply_bf16(c, a, b)
#define _tile_dpbssd(c, a, b) turnkeep::emulated_tiles().multiply_int8<int8_t, int8_t>(c, a, b)
#define _tile_dpbsud(c, a, b) turnkeep::emulated_tiles().multiply_int8<int8_t, uint8_t>(c, a, b)
#define _tile_dpbusd(c, a, b) turnkeep::emulated_tiles().multiply_int8<uint8_t, int8_t>(c, a, b)
#define _tile_dpbuud(c, a, b) turnkeep::emulated_tiles().multiply_int8<uint8_t, uint8_t>(c, a, b)
#ifndef __AVX512BF16__
#define _mm512_cvtneps_pbh(v) turnkeep::to_bf16((turnkeep::Vec)(v))
#endif
