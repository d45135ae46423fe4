// The decode kernel as functions of a shared library.
#include "decode.cu"

extern "C" int parameters_size() { return sizeof(Params); }
// The global memory that launches may read from now on.
extern "C" void forget() { machine::readable.clear(); }
extern "C" void allow(const void* begin, size_t bytes) { machine::readable.push_back({(const u8*)begin, bytes}); }

// Runs the launch that makes the plan (`merged` -1), stage 1 (0), or the stage 2 whose blocks merge as many rows; `message`
// gets an error of up to 200 characters.
extern "C" bool emulate(int merged, const Params* p, int columns, int rows, unsigned bytes, bool eager, unsigned seed,
                        char* message) {
  const std::map<int, void (*)(const Params)> kernels{
      {-1, oscar_decode_plan},     {0, oscar_decode_stage1},   {1, oscar_decode_stage2_1},   {2, oscar_decode_stage2_2},
      {4, oscar_decode_stage2_4}, {8, oscar_decode_stage2_8}, {16, oscar_decode_stage2_16}, {24, oscar_decode_stage2_24}};
  const auto run = kernels.at(merged);
  const int threads = merged <= 0 ? THREADS : merged == 1 ? 512 : 256;
  const std::string error =
      machine::run({(u32)columns, (u32)rows}, threads, bytes, eager, seed, [=] { run(*p); });
  strncpy(message, error.c_str(), 200);
  return error.empty();
}
