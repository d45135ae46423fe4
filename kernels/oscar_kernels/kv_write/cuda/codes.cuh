// Clip, scale, codes and their bytes: what quantizer.py defines.
#pragma once

#include "order.cuh"

// Scale and offset in 16 bits, saturated; `inverse` becomes 1 / range.
DEV u32 affine_word(float low, float high, float& inverse) {
  const float range = fmaxf(high - low, MIN_RANGE);
  inverse = divide(1.f, range);
  const float scale = fminf(divide(range, 3.f), LARGEST), offset = fminf(fmaxf(low, -LARGEST), LARGEST);
  return AFFINE_BF16 ? pack_bf16(scale, offset) : pack_f16(scale, offset);
}

// 2^23 + code as a float's bits, where `y = (x - low) / range`: code = 3 * clamp(y, 0, 1), rounded; 0 for NaN. An exact
// tie goes up, as in the reference, because UP, more than the error of `y`, is added to it before.
constexpr float UP = 1.5e-7f;
DEV u32 code_bits(float y) { return bits_of(fmaf(saturate(y), 3.f, ONE)); }

// The codes of the thread's part of row g + 8 I as bytes.
template <class R, int I>
DEV void pack_codes(const float (&x)[R::D / 2], const float (&low)[R::G], const float (&inverse)[R::G],
                    u32 (&bytes)[R::D / 64]) {
  constexpr int JQ = R::D / 32;
  UNROLL for (int w = 0; w < JQ / 2; w++) {
    bytes[w] = 0u - 0xE7000000u;  // what 85 times 0x4B000000, the bits of 2^23, leaves
    UNROLL for (int b = 0; b < 4; b++) UNROLL for (int q = 0; q < 4; q++) {
      const int v = q * R::G / 4;
      const float y = x[4 * (q * JQ + 2 * w + b / 2) + 2 * I + b % 2];
      bytes[w] += code_bits(fmaf(y - low[v], inverse[v], UP)) << (8 * b + 2 * q);
    }
  }
}

// Clips and quantizes the thread's part of row g + 8 I and stores it.
template <class R, int I>
DEV void store_codes(const Params& p, float (&x)[R::D / 2], float (&low)[R::G], float (&high)[R::G], float limit,
                     long long place, bool valid, int t) {
  constexpr int N = R::D / 4, JQ = R::D / 32;
  float inverse[R::G];
  u32 words[R::G], bytes[JQ / 2];
  bool narrow = false;
  UNROLL for (int v = 0; v < R::G; v++) {
    if (R::RANK) {
      low[v] = fminf(fmaxf(low[v], -limit), limit);
      high[v] = fmaxf(fminf(high[v], limit), -limit);
    }
    narrow |= valid && high[v] - low[v] < MIN_RANGE;
    words[v] = affine_word(low[v], high[v], inverse[v]);
  }
  // Codes of values beyond the limit saturate by themselves, except in groups narrower than the smallest range.
  if (R::RANK && narrow) {
    UNROLL for (int n = 0; n < N; n++) {
      float& y = x[n / 2 * 4 + 2 * I + n % 2];
      y = fminf(fmaxf(y, -limit), limit);
    }
  }
  pack_codes<R, I>(x, low, inverse, bytes);
  if (!valid) return;
  store_words(p.codes + place * RECORD + R::CODES_AT + 2 * JQ * t, bytes);
  UNROLL for (int v = 0; v < R::G; v++) {
    if (t == v) store_word(p.affine + place * AFFINE + R::AFFINE_AT + 2 * v, words[v]);
  }
}

// The thread's part of row g + 8 I in bfloat16.
template <int D, int I>
DEV void store_row(u16* row, const float (&x)[D / 2], int t) {
  constexpr int JQ = D / 32;
  UNROLL for (int q = 0; q < 4; q++) {
    u32 words[JQ];
    UNROLL for (int j = 0; j < JQ; j++)
        words[j] = pack_bf16(x[4 * (q * JQ + j) + 2 * I], x[4 * (q * JQ + j) + 2 * I + 1]);
    store_words(row + q * (D / 4) + 2 * JQ * t, words);
  }
}
