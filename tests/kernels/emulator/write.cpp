// The write kernel as a function of a shared library; flags as for NVRTC.
#include "write.cu"

extern "C" long long_ways() { return machine::long_ways; }
extern "C" int parameters_size() { return sizeof(Params); }

// Runs a launch; `message` gets an error of up to 200 characters.
extern "C" bool emulate(const char* kernel, const Params* p, int blocks, unsigned bytes, bool eager, unsigned seed,
                        char* message) {
  auto run = oscar_write_step;
  int threads = STEP_THREADS;
#if DK <= 128 && DV <= 128
  if (strcmp(kernel, "oscar_write_step")) {
    run = strcmp(kernel, "oscar_write_slots") ? oscar_write : oscar_write_slots;
    threads = 128 * GROUPS;
  }
#endif
  const std::string error = machine::run({(u32)blocks, 1}, threads, bytes, eager, seed, [=] { run(*p); });
  strncpy(message, error.c_str(), 200);
  return error.empty();
}

// The clip of rows `[rows, D]` alone, as the four threads of each find it; rows come in sixteens.
template <class R>
static std::string clip(const float* x, float* limits, int rows) {
  std::string error;
  if constexpr (R::RANK > 0 && R::D <= 128)
    for (int first = 0; first < rows && error.empty(); first += 16)
      error = machine::run({1, 1}, 32, 16, false, 0, [=] {
        const int row = first + machine::current / 4, t = machine::current % 4;
        float y[R::D / 2], low[2][R::G], high[2][R::G], limit[2];
        for (int j = 0; j < R::D / 8; j++)
          for (int i = 0; i < 2; i++)
            for (int e = 0; e < 2; e++)
              y[4 * j + 2 * i + e] = x[(row + 8 * i) * R::D + channel_of<R::D>(8 * j + 2 * t + e)];
        bool plain[2] = {true, true};
        extremes<R>(y, low, high, plain);
        Order<R>::find(y, low, high, limit, plain);
        for (int i = 0; i < 2; i++)
          for (int g = 0; g < 8; g++) {
            WarpRow<R> other(machine::current);
            for (int n = 0; n < WarpRow<R>::EACH; n++)
              other.x[n] = x[(first + g + 8 * i) * R::D + (other.quarter + n) * WarpRow<R>::BYTES + other.byte];
            const float found = other.limit();
            if (machine::current / 4 == g && !plain[i]) limit[i] = found;
          }
        for (int i = 0; i < 2; i++) limits[(row + 8 * i) * 4 + t] = limit[i];
      });
  return error;
}
extern "C" bool emulate_clip(const float* x, float* limits, int rows, bool value, char* message) {
  const std::string error = value ? clip<ValueRow>(x, limits, rows) : clip<KeyRow>(x, limits, rows);
  strncpy(message, error.c_str(), 200);
  return error.empty();
}
