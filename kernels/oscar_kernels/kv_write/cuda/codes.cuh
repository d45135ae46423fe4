// Clip, scale, codes and their bytes: what quantizer.py defines.
#pragma once

#include "order.cuh"

// An exact tie between two codes goes up, as in the reference, because this, more than the error of a value's place in
// the range, is added to the place.
constexpr float UP = 2e-7f;

// The range of a group. A value's place in it, 0 to 1, is (x - from) * inverse + shift: `from` is 0 where the range has
// both signs, so one instruction does; elsewhere that would cancel, and it is the low end.
template <int BITS>
struct Scale {
  static constexpr float STEPS = (1 << BITS) - 1, STEP = 1.f / STEPS;
  float inverse, shift, from;
  u32 word;  // scale and offset in 16 bits, saturated

  DEV Scale(float low, float high) {
    const float range = fmaxf(high - low, MIN_RANGE), near = reciprocal(range);
    inverse = fmaf(fmaf(-range, near, 1.f), near, near);
    from = low <= 0.f && high >= 0.f ? 0.f : low;
    shift = fmaf(from - low, inverse, UP);
    const float near_step = multiply(range, STEP);  // and the rest of it: correctly rounded (P. Markstein)
    const float scale = fminf(fmaf(fmaf(-STEPS, near_step, range), STEP, near_step), LARGEST);
    const float offset = fminf(fmaxf(low, -LARGEST), LARGEST);
    word = AFFINE_BF16 ? pack_bf16(scale, offset) : pack_f16(scale, offset);
  }
};

// 2^23 + code as a float's bits of a value at this place: code = STEPS * clamp(place, 0, 1), rounded; 0 for NaN.
template <int BITS>
DEV u32 code_bits(float place) {
  return bits_of(fmaf(saturate(place), Scale<BITS>::STEPS, ONE));
}

// Clips the extremes of a row's groups. Codes of values beyond the limit saturate by themselves, except in groups
// narrower than the smallest range: such a row is not `plain`.
template <class R>
DEV void clip_extremes(float (&low)[R::G], float (&high)[R::G], float limit, bool& plain) {
  UNROLL for (int v = 0; v < R::G; v++) {
    low[v] = fminf(fmaxf(low[v], -limit), limit);
    high[v] = fmaxf(fminf(high[v], limit), -limit);
    plain &= !(high[v] - low[v] < MIN_RANGE);
  }
}

// Quantizes the thread's part of row g + 8 I, whose groups have these extremes, both signs each, and stores it.
template <class R, int I>
DEV void store_codes(const float (&x)[R::D / 2], const float (&low)[R::G], const float (&high)[R::G], u8* codes,
                     u16* affine, bool valid, int t) {
  constexpr int JQ = R::D / 32, IN_BYTE = 8 / R::BITS;  // quarters
  // What the bits of 2^23, 0x4B000000, leave of the last byte of a sum: 85 or 17 times them.
  constexpr u32 REST = 0x4B000000u * (R::BITS == 2 ? 85u : 17u);
  float inverse[R::G], shift[R::G];
  UNROLL for (int v = 0; v < R::G; v++) {
    const Scale<R::BITS> scale(low[v], high[v]);
    inverse[v] = scale.inverse;
    shift[v] = scale.shift;
    if (valid && t == v) store_word(affine + 2 * v, scale.word);
  }
  UNROLL for (int part = 0; part < 4 / IN_BYTE; part++) {
    u32 bytes[JQ / 2];
    UNROLL for (int w = 0; w < JQ / 2; w++) {
      bytes[w] = 0u - REST;
      UNROLL for (int b = 0; b < 4; b++) UNROLL for (int i = 0; i < IN_BYTE; i++) {
        const int q = part * IN_BYTE + i, v = q * R::G / 4;
        const float y = x[4 * (q * JQ + 2 * w + b / 2) + 2 * I + b % 2];
        bytes[w] += code_bits<R::BITS>(fmaf(y, inverse[v], shift[v])) << (8 * b + R::BITS * i);
      }
    }
    if (valid) store_words(codes + part * (R::D / 4) + 2 * JQ * t, bytes);
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
