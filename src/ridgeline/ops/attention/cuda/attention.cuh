// What the forward and the backward kernel of short-window attention share: the skew, its masks, dropout. Tiles: tiles.cuh.
//
// Row blocks of 64 queries are numbered i, of 64 keys j; window w of the table holds the distances 64 w … 64 w + 63,
// largest first.
//
// The skew: with r and c a query's and a key's place in their blocks and i - j = w, the relative score of (r, c) is
// column c - r + 63 of [Q·window wᵀ | Q·window w-1ᵀ]. Rows r and r + 8 are one 8-column tile apart and otherwise shifted
// alike, by 7 - r % 8: they travel together, packed into one register, through one shuffle.
#pragma once
#include "ridgeline/dropout.cuh"
#include "tiles.cuh"

namespace rl {

constexpr int BLOCKS = ROW_BLOCKS;    // row blocks of 64: ceil(T / 64), at most 4
constexpr bool RELATIVE = RL_RELATIVE, DROPOUT = RL_DROPOUT;

// d[64, D] (+)= square · tile
RL_D void multiply_square(float (&d)[D / 2], u32 square, u32 tile, bool fresh) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
    wgmma<D, 0, 1>(d, operand<128>(square + 2 * k), operand<ROW>(tile + ROW * k), k > 0 || !fresh);
}
// d[64, D] (+)= squareᵀ · tile
RL_D void multiply_square_transposed(float (&d)[D / 2], u32 square, u32 tile, bool fresh) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
    wgmma<D, 1, 1>(d, operand<128>(square + 128 * k), operand<ROW>(tile + ROW * k), k > 0 || !fresh);
}

// A shift to the left by `amount` columns (0 … 8) of a row that four lanes hold in tiles of 8 columns. Even and odd columns
// travel apart; where the shift is odd they arrive in each other's place.
struct Shift {
  int even_source, odd_source;
  bool odd, even_wraps, odd_wraps;
  u32 low, high;  // selectors of permute: both columns of the first and of the second of two packed rows or tiles
  RL_D Shift(int lane, int amount) {
    const int place = lane & 3, half = amount >> 1, half_up = (amount + 1) >> 1;
    odd = amount & 1;
    const int even_shift = odd ? half_up : half, odd_shift = half;
    even_source = (lane & 28) | ((place + even_shift) & 3), even_wraps = place < even_shift;
    odd_source = (lane & 28) | ((place + odd_shift) & 3), odd_wraps = place < odd_shift;
    low = odd ? 0x1054 : 0x5410, high = odd ? 0x3276 : 0x7632;
  }
  RL_D u32 even(u32 tile, u32 next) const { return shuffle(even_wraps ? next : tile, even_source); }
  RL_D u32 uneven(u32 tile, u32 next) const { return shuffle(odd_wraps ? next : tile, odd_source); }
};

// Packed columns of two neighbouring windows (or key blocks), ready to be shifted. Element m holds, of rows r and r + 8,
// tiles m + 1 and m of the windows, or tiles m and m + 1 of the key blocks. The left one is new; the right one is what
// was left before.
struct Band {
  u32 even[15], uneven[15];
  RL_D void clear() {
#pragma unroll
    for (int m = 0; m < 15; ++m) even[m] = uneven[m] = 0;
  }
  RL_D void move_right() {
#pragma unroll
    for (int m = 0; m < 7; ++m) even[8 + m] = even[m], uneven[8 + m] = uneven[m];
  }
};

// A new left window of Q·windowᵀ. first[] keeps tile 0 of row r for the seam with the next window.
RL_D void take_window(Band& band, float (&first)[2], const float (&r)[32]) {
  band.move_right();
  band.even[7] = pack_pair(first[0], r[30]), band.uneven[7] = pack_pair(first[1], r[31]);
#pragma unroll
  for (int m = 0; m < 7; ++m) {
    band.even[m] = pack_pair(r[4 * m + 4], r[4 * m + 2]), band.uneven[m] = pack_pair(r[4 * m + 5], r[4 * m + 3]);
  }
  first[0] = r[0], first[1] = r[1];
}
template <int WARP_INDEX>
RL_D void skewed_rows(float (&s)[32], const Band& band, const Shift& shift) {
  constexpr int START = 6 - 2 * WARP_INDEX;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const u32 a = shift.even(band.even[START + n], band.even[START + n + 1]);
    const u32 b = shift.uneven(band.uneven[START + n], band.uneven[START + n + 1]);
const u32 e = shift.odd ? b : a, o = shift.odd ? a : b;
    s[4 * n] = pair_low(e), s[4 * n + 1] = pair_low(o), s[4 * n + 2] = pair_high(e), s[4 * n + 3] = pair_high(o);
  }
}
// s: the skew of the band
RL_D void skewed(float (&s)[32], const Band& band, const Shift& shift, int warp) {
  switch (warp) {
    case 0: skewed_rows<0>(s, band, shift); break;
    case 1: skewed_rows<1>(s, band, shift); break;
    case 2: skewed_rows<2>(s, band, shift); break;
    default: skewed_rows<3>(s, band, shift);
  }
}

// Score gradients, packed along columns: pairs[2 n + h] of tile n, row r + 8 h. A new left key block for the way back.
RL_D void take_keys(Band& band, u32& first, const u32 (&pairs)[16]) {
  band.move_right();
  band.even[7] = permute<0x5410>(pairs[14], first), band.uneven[7] = permute<0x7632>(pairs[14], first);
#pragma unroll
  for (int m = 0; m < 7; ++m) {
    band.even[m] = permute<0x5410>(pairs[2 * m], pairs[2 * m + 3]);
    band.uneven[m] = permute<0x7632>(pairs[2 * m], pairs[2 * m + 3]);
  }
  first = pairs[1];
}
template <int START>
RL_D void shift_band_from(u32 (&pairs)[16], const Band& band, const Shift& shift) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const u32 a = shift.even(band.even[START + n], band.even[START + n + 1]);
    const u32 b = shift.uneven(band.uneven[START + n], band.uneven[START + n + 1]);
    pairs[2 * n] = permute(a, b, shift.low), pairs[2 * n + 1] = permute(a, b, shift.high);
  }
}
// The band's columns from tile 2 · warp on, shifted and packed along columns. From the key blocks on both sides of a window
// to the gradient of Q·windowᵀ; and with 3 - warp for `warp`, from windows to relative scores.
RL_D void shift_band(u32 (&pairs)[16], const Band& band, const Shift& shift, int warp) {
  switch (warp) {
    case 0: shift_band_from<0>(pairs, band, shift); break;
    case 1: shift_band_from<2>(pairs, band, shift); break;
    case 2: shift_band_from<4>(pairs, band, shift); break;
    default: shift_band_from<6>(pairs, band, shift);
  }
}

// A square's 16 rows of one warp, packed along columns, to shared memory under the 128-byte swizzle: 16 columns b, or all.
RL_D void store_columns(u32 square, int b, u32 w, u32 x, u32 y, u32 z, int warp, int lane) {
  store_matrices(square + swizzle128(16 * warp + (lane & 15), 2 * b + (lane >> 4)), w, x, y, z);
}
RL_D void store_square(u32 square, const u32 (&pairs)[16], int warp, int lane) {
#pragma unroll
  for (int b = 0; b < 4; ++b)
    store_columns(square, b, pairs[4 * b], pairs[4 * b + 1], pairs[4 * b + 2], pairs[4 * b + 3], warp, lane);
}

// The counter's base for a lane: rows 16 (4 i + warp) + lane / 4, columns 64 j + 2 (lane % 4) of a (T, T) square.
RL_D u32 dropout_base(int i, int j, int warp, int lane, int tiles) {
  return static_cast<u32>(((i * 4 + warp) * tiles + j * 4) * 64 + (lane >> 2) * 8 + 2 * (lane & 3));
}
// Keep decisions of a lane's eight elements in 16 columns: bit 15 for row r, bit 31 for row r + 8; [0] for the tile of
// the same half as the row (columns 0-7 with r, 8-15 with r + 8), [1] for the other one; then the column's parity.
RL_D void keep_words(u32 (&word)[2][2], u32 counter, DropoutKeys keys, u32 bias) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const DropoutWords w = dropout_words(counter + e, keys);
    word[0][e] = dropout_keep_bits(w.word_0, bias), word[1][e] = dropout_keep_bits(w.word_1, bias);
  }
}
// The keep decisions of a lane's 32 elements of a square, and the bit of element 4 n + 2 h + e among them.
RL_D u32 keep_square(u32 counter, DropoutKeys keys, u32 bias) {
  u32 all = 0;
#pragma unroll 1
  for (int b = 3; b >= 0; --b) {
    u32 word[2][2];
    keep_words(word, counter + 64 * b, keys, bias);
#pragma unroll
    for (int m = 3; m >= 0; --m) all = all >> 1 | (word[m >> 1][m & 1] & 0x80008000u);
  }
  return all;
}
RL_HD constexpr u32 keep_bit(int n, int h, int e) {
  return 1u << ((h ? 31 : 15) - (n / 2 * 4 + ((n ^ h) & 1) * 2 + e));
}
// All ones or zero for two neighbouring elements of tile n of the two, row r + 8 h.
RL_D u32 keep_mask_pair(const u32 (&word)[2][2], int n, int h) {
  return h ? permute<0xFFBB>(word[n ^ h][0], word[n ^ h][1]) : permute<0xDD99>(word[n ^ h][0], word[n ^ h][1]);
}

}  // namespace rl
