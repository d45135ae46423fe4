#!/usr/bin/env bash
# What is measured on a GPU, a part at a time, each in less than ten minutes on one H200 with 16 cores:
#
#   contrib/offline_gpu/measure.sh PART OUT       check | host | kernels | latents | vllm | start
#
# S and V are the Pythons of environments with SGLang and with vLLM (environment.py beside this
# file), REAL is the folder of a trained model, COMMIT what is measured, WITHOUT names steps of the
# check to leave out, one a line, and RESUME=1 leaves out what passed before at the same commit.
# Results go to OUT as they come. The first part that uses FlashInfer waits until it has compiled, for 90 s.
set -uo pipefail
export PYTHONSAFEPATH=1  # this checkout has packages of an installation in other folders
part=${1:?usage: measure.sh PART OUT}; out=${2:?usage: measure.sh PART OUT}
cd "$(dirname "$0")/../.."; mkdir -p "$out"
[ -z "${V:-}" ] || "$V" -c "import flashinfer" 2> /dev/null || export VLLM_USE_FLASHINFER_SAMPLER=0
flags="--grammar-backend=none --sampling-backend=pytorch"
keep() { "${@:2}" > >(tee "$out/$1.txt") 2> "$out/$1.err"; echo "$1: exit $?"; }
case $part in
check)
  without=(); while IFS= read -r step; do [ -n "$step" ] && without+=(--without "$step"); done <<< "${WITHOUT:-}"
  keep check timeout -s INT 570 "$S" tests/gpu_check/run.py --engine-flags="$flags" --commit="$COMMIT" \
    ${RESUME:+--resume} "${without[@]}" ${REAL:+--real-model "$REAL"} ${V:+--vllm-python "$V"} --document "$out/gpu-check.md" ;;
host)
  keep host-int2 "$S" contrib/benchmarks/host_cache.py int2 --rounds 2 -- $flags --cuda-graph-max-bs=16
  keep host-bf16 "$S" contrib/benchmarks/host_cache.py bf16 --rounds 2 --host 52 -- $flags --cuda-graph-max-bs=16 \
    --attention-backend=flashinfer --cuda-graph-backend-prefill=disabled ;;
kernels)
  keep decode "$S" contrib/kernel_bench/run.py --only decode
  keep drafts "$S" contrib/kernel_bench/run.py --only decode --drafts 4
  for shape in "4x16x128 --decode 4x60000" "2x8x256 --decode 8x16000" "8x5x128 --decode 128x2000"; do
    keep "decode-${shape%% *}" "$S" contrib/kernel_bench/run.py --only decode,baseline --heads $shape
  done
  keep prefill "$S" contrib/kernel_bench/run.py --variants --only prefill ;;
latents)
  keep fa3 "$V" contrib/mla/decode_speed.py --only fa3,ours,ours-triton,write,write-carried --cases 16x30000
  keep flashinfer "$S" contrib/mla/decode_speed.py --only ours,flashinfer-fa3 ;;
vllm)
  keep steps "$V" contrib/benchmarks/vllm_steps.py int2,FLASH_ATTN --cases 1x8000,16x20000,1x100000
  keep bench "$V" -m oscar_zoo bench serve --dummy-weights Qwen3-8B --engine vllm --batch 1 --context 8000 --json ;;
start)
  keep start "$S" contrib/benchmarks/start_speed.py --filled --rounds 1 ;;
*)
  echo "no part is called $part" >&2; exit 2 ;;
esac
