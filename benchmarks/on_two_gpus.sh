#!/bin/sh
# What two H200s of one machine measure in ten minutes, one-GPU work on both at once:
#
#   sh benchmarks/on_two_gpus.sh PART OUT      PART: ranks, rest, rounds, bytes; OUT: a folder for results
#
# ranks: Qwen3-8B on one GPU and on two (with ordered sums, with EAGLE-3, bundled models with drafts), the KV cache in e4m3,
# HTTP streams. rest: first tokens beside OLD (a folder with unisono/ of another commit), the host's share alone, loading,
# exact runs, fp8, 9B, 35B-A3B. rounds: the kernel for Hopper's rounds alone; with tails in one launch in the engine, and without both.
# bytes: what a change of kernels asks for: 200 requests of the 8B in every way, without drafts and with EAGLE-3, and on two ranks.
# Each step prints its figures when it ends; TAR=FILE keeps everything. PYTHON names the interpreter (python3).
set -u
cd "$(dirname "$0")/.."
part=${1:?PART: ranks, rest, rounds or bytes}
out=${2:?OUT: a folder for results}
python=${PYTHON:-python3}
unisono="$python -m unisono"
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$out"
begun=$(date +%s)
cores=$(nproc)
half=$((cores / 2))

step() { # NAME SECONDS SHOWN COMMAND…   SHOWN: a pattern of the lines that are printed
    name=$1 limit=$2 shown=$3
    shift 3
    started=$(date +%s)
    timeout -k 5 "$limit" "$@" >"$out/$name.txt" 2>&1
    echo "[$(($(date +%s) - begun)) s] $name: status $?, $(($(date +%s) - started)) s"
    grep -E "$shown|Error" "$out/$name.txt" | cut -c1-240 | tail -n 14
}
on() { # GPU COMMAND…   with one GPU and half of the cores
    gpu=$1
    shift
    first=$((gpu * half))
    taskset -cp "$first-$((first + half - 1))" "$(exec sh -c 'echo $PPID')" >/dev/null 2>&1
    export CUDA_VISIBLE_DEVICES=$gpu
    "$@"
}
tp() { # NAME SECONDS CASE RANKS FLAG…
    name=$1 limit=$2 case=$3 ranks=$4
    shift 4
    step "$name" "$((limit + 5))" "^\| " "$python" -m benchmarks.tensor_parallel --cases "$case" --ranks "$ranks" --limit "$limit" \
        --exact 120 --out "$out/$name.json" "$@"
}
latency() { # NAME SECONDS SHAPE FLAG…
    name=$1 limit=$2 shape=$3
    shift 3
    step "$name" "$limit" "^\|" $unisono bench latency --load-format dummy --model "benchmarks/shapes/$shape" --max-num-seqs 64 \
        --output-len 64 --max-model-len 9000 "$@"
}
exact() { # NAME SECONDS SHAPE FLAG…
    name=$1 limit=$2 shape=$3
    shift 3
    step "$name" "$limit" "differ|^\|| of " $unisono bench exact --load-format dummy --model "benchmarks/shapes/$shape" "$@"
}
empty() { # NAME   a start with no compiled kernel
    step "$1" 90 "^Start" env TRITON_CACHE_DIR="$out/cache-$1" $unisono bench latency --load-format dummy \
        --model benchmarks/shapes/qwen3-8b --batch 1 --prompts 128 --output-len 16 --max-model-len 9000
    rm -rf "$out/cache-$1"
}
without() { # COMMAND…   without the kernel for rounds and without tails in one launch
    UNISONO_STAYING_LAUNCHES=0 "$@"
}
http() { # NAME
    step "$1" 70 "hroughput|tokens/s|TTFT" $unisono bench serve --model tiny --num-prompts 2048 --max-concurrency 256 \
        --input-len 32 --output-len 256 --ignore-eos --num-warmups 64
}
head='{"method":"eagle3","model":"benchmarks/shapes/qwen3-8b-eagle3","num_speculative_tokens":3,"load_format":"dummy","adaptive":false}'
mtp='{"method":"mtp","num_speculative_tokens":3,"load_format":"dummy","adaptive":false}'

one_gpu_of_ranks() {
    tp one 100 "8b" 1
    tp one-k3 70 "8b k=3" 1
}
e4m3_cache() {
    latency kv-auto 70 qwen3-8b --batch 1,16,64 --prompts 2048,8192
    latency kv-fp8 90 qwen3-8b --batch 1,16,64 --prompts 2048,8192 --kv-cache-dtype fp8
}
first_tokens() { # processes of old and new code in turns
    for turn in 1 2 3 4; do
        step "old-$turn" 60 "ttft" env PYTHONPATH="$OLD:$PYTHONPATH" "$python" -P benchmarks/old_new.py --ttft 128 --out "$out/old-$turn.json"
        step "new-$turn" 60 "ttft" "$python" -P benchmarks/old_new.py --ttft 128 --out "$out/new-$turn.json"
    done
}

case $part in
ranks)
    (on 0 one_gpu_of_ranks) &
    (on 1 e4m3_cache) &
    wait
    tp two 100 "8b" 2
    tp two-ordered 70 "8b ordered" 2
    tp two-k3 70 "8b k=3" 2
    tp two-drafts 70 "8b k=3 whole drafts" 2
    tp tiny-eagle3 100 tiny-eagle3 1,2 --batch 1
    tp tiny-hybrid 170 tiny-hybrid-mtp 1,2 --batch 1
    "$python" -m benchmarks.tensor_parallel --table "$out"/one*.json "$out"/two*.json | tee "$out/ranks.txt"
    (on 0 exact exact-kv-fp8 100 qwen3-8b --requests 60 --kv-cache-dtype fp8 --speculative-config "$head") &
    (on 1 eval "http http-1; http http-2") &
    wait
    ;;
rest)
    step host 40 "^\|" "$python" -m benchmarks.host --requests 256
    if [ -n "${OLD-}" ]; then (on 0 first_tokens) & fi
    (on 1 eval 'exact exact-35b 130 qwen3.5-35b-a3b --requests 60 --output-len 16 --speculative-config "$mtp"
        step loading 60 "^\|" "$python" -m benchmarks.loading --at /dev/shm --layers 16') &
    wait
    (on 0 eval 'latency 8b-fp8 70 qwen3-8b --quantization fp8 --batch 1,16,64 --prompts 2048,8192
        exact exact-eagle3 130 qwen3-8b --requests 100 --speculative-config "$head"') &
    (on 1 eval 'latency 9b 70 qwen3.5-9b --batch 1,16,64 --prompts 2048,8192
        latency 35b 90 qwen3.5-35b-a3b --batch 1,64 --prompts 2048,8192') &
    wait
    ;;
rounds)
    (on 0 step attention 130 "^\|" "$python" -m benchmarks.attention --rounds
        on 0 exact exact-rounds 200 qwen3-8b --requests 200 --speculative-config "$head") &
    (on 1 without latency without 90 qwen3-8b --batch 1,4,16,64 --prompts 2048
        on 1 latency with 90 qwen3-8b --batch 1,4,16,64 --prompts 2048
        on 1 without latency without-fp8 70 qwen3-8b --batch 1,4,16,64 --prompts 2048 --quantization fp8
        on 1 latency with-fp8 70 qwen3-8b --batch 1,4,16,64 --prompts 2048 --quantization fp8
        on 1 empty empty
        on 1 without tp without-k3 60 "8b k=3" 1
        on 1 tp with-k3 60 "8b k=3" 1) &
    wait
    ;;
bytes)
    (on 0 eval 'exact exact-none 150 qwen3-8b --requests 200
        tp eagle3-one 90 8b-eagle3 1 --exact 200
        step chain 70 "^\|" "$python" -m benchmarks.chain --model benchmarks/shapes/qwen3-8b --quantization fp8') &
    (on 1 exact exact-eagle3 280 qwen3-8b --requests 200 --speculative-config "$head") &
    wait
    tp eagle3-two 140 8b-eagle3 2 --exact 200
    tp 35b-two 100 35b 2 --exact 200
    "$python" -m benchmarks.tensor_parallel --table "$out"/eagle3-*.json "$out"/35b-two.json | tee "$out/bytes.txt"
    ;;
*)
    echo "PART $part is not one of ranks, rest, rounds, bytes." >&2
    exit 2
    ;;
esac
if [ -n "${TAR-}" ]; then tar czf "$TAR" -C "$out" .; fi
