#!/bin/sh
# What is measured on an H200 after a change, in parts of under ten minutes:
#
#   sh benchmarks/on_gpu.sh PART OUT      PART: bars, tails, surface, house, mixed, kv, blocks, gemma, formats, latent, new (one GPU), ranks (two GPUs); OUT: a folder for results
#
# Each step has a time limit and a file OUT/NAME.txt; the ends of all of them are printed last.
# PYTHON names the interpreter that has Unisono's dependencies (python3).
set -u
cd "$(dirname "$0")/.."
part=${1:?PART: bars, tails, surface, house, mixed, kv, blocks, gemma, formats, latent, new or ranks}
out=${2:?OUT: a folder for results}
python=${PYTHON:-python3}
unisono="$python -m unisono"
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$out"
names=

step() { # NAME SECONDS COMMAND…
    name=$1 limit=$2
    shift 2
    names="$names $name"
    begun=$(date +%s)
    timeout -k 5 "$limit" "$@" >"$out/$name.txt" 2>&1
    echo "exit status $?, $(($(date +%s) - begun)) s, $(date +%F): $*" >>"$out/$name.txt"
    tail -n 1 "$out/$name.txt"
}

tests() { # NAME SECONDS FILE…
    name=$1 limit=$2
    shift 2
    step "$name" "$limit" "$python" -m pytest -q -x --tb=short -p no:cacheprovider "$@"
}

case $part in
bars) # the host's share, HTTP, bytes of the 8B and of 35B-A3B, hybrids' first tokens; first tokens beside OLD
    latency="bench latency --load-format dummy --max-num-seqs 64 --output-len 96 --max-model-len 9000"
    mtp='{"method":"mtp","num_speculative_tokens":3,"load_format":"dummy"}'
    if [ -n "${OLD-}" ]; then # a folder with unisono/ of the commit to compare with
        for turn in 1 2; do
            step "old-$turn" 90 env "PYTHONPATH=$OLD:$PYTHONPATH" "$python" -P benchmarks/old_new.py --requests 40 --repeats 25 --out "$out/old-$turn.json"
            step "new-$turn" 60 "$python" -P benchmarks/old_new.py --requests 40 --repeats 25 --out "$out/new-$turn.json"
        done
        step compared 10 "$python" -P benchmarks/old_new.py --compare "$out/old-1.json" "$out/new-1.json" "$out/old-2.json" "$out/new-2.json"
    fi
    head='{"method":"eagle3","model":"benchmarks/shapes/qwen3-8b-eagle3","num_speculative_tokens":3,"load_format":"dummy"}'
    for turn in 1 2; do # a machine's host varies by a factor of two
        step "host-$turn" 40 "$python" -m benchmarks.host --requests 256
        step "http-$turn" 60 $unisono bench serve --model tiny --num-prompts 2048 --max-concurrency 256 --input-len 32 \
            --output-len 256 --ignore-eos --num-warmups 64
    done
    step exact-eagle3 130 $unisono bench exact --model benchmarks/shapes/qwen3-8b --load-format dummy --speculative-config "$head"
    step exact-35b 110 $unisono bench exact --requests 80 --output-len 16 --model benchmarks/shapes/qwen3.5-35b-a3b --load-format dummy \
        --speculative-config "$mtp"
    step loading 60 "$python" -m benchmarks.loading --at /dev/shm --layers 16
    step 9b 50 $unisono $latency --model benchmarks/shapes/qwen3.5-9b --batch 1 --prompts 128,512,2048,8192
    step 35b 50 $unisono $latency --model benchmarks/shapes/qwen3.5-35b-a3b --batch 1 --prompts 512,1024,2048,8192
    ;;
tails) # a layer after its mixer in one launch: bits, kernels, rounds
    tests tails-bits 360 tests/kernels/test_layer_tail.py
    step tails-kernels 60 "$python" -m benchmarks.layer_tail --only kernels --shapes 8b
    step tails-rounds 140 "$python" -m benchmarks.layer_tail --only rounds --models qwen3-8b
    ;;
surface) # the soak without speculation, pictures, adapters
    step soak 240 "$python" -m benchmarks.soak --model tiny --requests 10000 --speculative-method none
    step eval-vl 60 $unisono eval tiny-vl --problems 300
    step eval-vl-drafts 80 $unisono eval tiny-vl --problems 300 --speculative-method eagle3 --speculative-model tiny-vl-eagle3
    step pictures 90 "$python" -m benchmarks.pictures
    tests pictures-tests 150 tests/engine/test_pictures.py
    step adapters 200 "$python" -m benchmarks.adapters --limit 180
    ;;
house) # other kernels that changed, prompts, the stall bound
    tests kernels 200 tests/kernels/test_norm.py tests/kernels/test_rotary.py tests/kernels/test_experts_mxfp4.py \
        tests/kernels/test_adapters.py tests/kernels/test_linear_norm.py
    step latency 150 $unisono bench latency --model benchmarks/shapes/qwen3-8b --load-format dummy --max-model-len 9000
    step gpt-oss 120 $unisono bench latency --model benchmarks/shapes/gpt-oss-20b --load-format dummy --max-model-len 9000 --profile
    ;;
mixed) # running requests decode in prompt passes, or in rounds of their own: gaps, prompt rate, mixed load
    shape="--model benchmarks/shapes/qwen3-8b --load-format dummy"
    load="--num-prompts 384 --max-num-seqs 256 --input-len 64:1536 --output-len 32:384 --ignore-eos --max-model-len 2048"
    for flag in --no-enable-mixed-chunk --enable-mixed-chunk; do
        stall="--scenario stall --streams 32 --prompts 1,8 --prompt-len 8000"
        step "stall$flag" 110 $unisono bench throughput $stall $shape $flag
        step "load$flag" 110 $unisono bench throughput $load $shape $flag
    done
    tests mixed-tests 100 tests/engine/test_mixed_chunk.py
    ;;
kv) # the KV cache in e4m3: bits, a layer's time, rounds and prompts, kernels' tests
    shape="--model benchmarks/shapes/qwen3-8b --load-format dummy"
    head='{"method":"eagle3","model":"benchmarks/shapes/qwen3-8b-eagle3","num_speculative_tokens":3,"load_format":"dummy"}'
    for heads in 0 2; do
        step "bits-$heads" 40 "$python" -m benchmarks.attention --kv fp8 --bits "$heads"
    done
    for kind in auto fp8; do
        step "layer-$kind" 50 "$python" -m benchmarks.attention --speed --kv "$kind"
        step "rounds-$kind" 70 $unisono bench latency $shape --max-num-seqs 64 --output-len 96 --max-model-len 9000 --kv-cache-dtype "$kind"
        step "eagle3-$kind" 60 $unisono bench latency $shape --max-num-seqs 64 --output-len 96 --max-model-len 2048 --batch 16,64 --prompts "" \
            --speculative-config "$head" --synthetic-acceptance-length 2.5 --kv-cache-dtype "$kind"
    done
    step exact-fp8 100 $unisono bench exact $shape --requests 100 --kv-cache-dtype fp8 --speculative-config "$head"
    tests kv-tests 60 tests/kernels/test_kv_e4m3.py tests/kernels/test_rotary.py
    ;;
gemma) # Gemma 4 (MODELS: some of its sizes): bytes in six ways, decode and first tokens in bf16 and fp8, rounds with an assistant of random weights
    for model in ${MODELS:-26b-a4b 31b e4b}; do
        shape="--model benchmarks/shapes/gemma-4-$model --load-format dummy"
        sizes="--output-len 96"
        if [ "$model" = 31b ]; then # 64 prompts take so many passes that the first request needs more tokens; bf16 leaves 4,632 pages
            sizes="--context 512 --output-len 320"
        fi
        latency="bench latency $shape --max-num-seqs 64 $sizes --max-model-len 9000 --batch 1,16,64 --prompts 2048,8192"
        step "assistant-$model" 60 "$python" -m benchmarks.gemma_assistant "benchmarks/shapes/gemma-4-$model" "$out/assistant-$model"
        drafts="{\"method\":\"mtp_frozen\",\"model\":\"$out/assistant-$model\",\"num_speculative_tokens\":3}"
        step "exact-$model" 140 $unisono bench exact $shape --requests 200 --output-len 16 --speculative-config "$drafts"
        step "latency-$model" 120 $unisono $latency
        step "fp8-$model" 100 $unisono $latency --quantization fp8
        step "drafts-$model" 80 $unisono bench latency $shape --max-num-seqs 64 --output-len 96 --max-model-len 2048 --batch 1,16 --prompts "" \
            --speculative-config "$drafts" --synthetic-acceptance-length 2.5
    done
    step kernels-gemma 70 "$python" -m benchmarks.gemma_kernels
    tests gemma-tests 150 tests/kernels/test_attention_pictures.py tests/kernels/test_gemma_kernels.py tests/kernels/test_sandwich_norm.py \
        tests/kernels/test_beside.py tests/kernels/test_attention_wide_rounds.py
    ;;
blocks) # block drafters with random weights: rounds, drafting and catching up beside EAGLE-3; bytes; kernels' tests
    shape="--model benchmarks/shapes/qwen3-8b --load-format dummy"
    block() { # METHOD SHAPE K
        echo '{"method":"'"$1"'","model":"benchmarks/shapes/qwen3-8b-'"$2"'","num_speculative_tokens":'"$3"',"load_format":"dummy"}'
    }
    step rounds 300 "$python" -m benchmarks.block_drafters
    step exact-dflash 110 $unisono bench exact $shape --requests 100 --speculative-config "$(block dflash dflash 7)"
    step exact-dspark 110 $unisono bench exact $shape --requests 100 --speculative-config "$(block dspark dspark 7)"
    tests blocks-tests 60 tests/kernels/test_block.py tests/drafters/test_blocks.py
    ;;
formats) # the 8B in each weight format, and 35B-A3B in NVFP4: decode and first tokens beside bf16, bytes in six ways
    sizes="--load-format dummy --max-num-seqs 64 --output-len 96 --max-model-len 9000 --batch 1,16,64 --prompts 2048,8192"
    for format in "" -nvfp4 -int8 -awq; do
        step "latency$format" 60 $unisono bench latency --model "benchmarks/shapes/qwen3-8b$format" $sizes
    done
    step latency-fp8 60 $unisono bench latency --model benchmarks/shapes/qwen3-8b --quantization fp8 $sizes
    for format in -nvfp4 -int8; do
        step "exact$format" 80 $unisono bench exact --model "benchmarks/shapes/qwen3-8b$format" --load-format dummy --requests 100 --output-len 16
    done
    for format in -fp8 -nvfp4; do
        step "35b$format" 90 $unisono bench latency --model "benchmarks/shapes/qwen3.5-35b-a3b$format" $sizes
    done
    ;;
latent) # latent attention and Mamba2: decode, first tokens, rounds with MTP; bytes in six ways
    sizes="--load-format dummy --max-num-seqs 64 --output-len 96 --max-model-len 9000 --batch 1,16,64"
    mtp='{"method":"mtp","num_speculative_tokens":3,"load_format":"dummy"}'
    for model in glm-4.7-flash nemotron-3-nano-30b-a3b glm-4.7-flash-fp8; do
        step "latency-$model" 100 $unisono bench latency --model "benchmarks/shapes/$model" $sizes --prompts 2048,8192
    done
    step drafts-glm 70 $unisono bench latency --model benchmarks/shapes/glm-4.7-flash $sizes --prompts "" --speculative-config "$mtp" \
        --synthetic-acceptance-length 2.5
    step exact-glm 120 $unisono bench exact --model benchmarks/shapes/glm-4.7-flash --load-format dummy --output-len 16 --speculative-config "$mtp"
    step exact-nemotron 120 $unisono bench exact --model benchmarks/shapes/nemotron-3-nano-30b-a3b --load-format dummy --output-len 16
    ;;
new) # tests of the newest kernels, side by side
    for name in ${KERNELS:-int8 nvfp4 latent shared_rows mamba2 gated_delta}; do
        tests "kernels-$name" "${LIMIT:-240}" "tests/kernels/test_$name.py" &
        names="$names kernels-$name"
    done
    wait
    ;;
ranks) # two GPUs: parts of one GPU's bits, then whole models
    tests parts 60 tests/kernels/test_parts.py
    step gathers 80 "$python" -m benchmarks.gathers
    step ranks 420 "$python" -m benchmarks.tensor_parallel --limit 400 --out "$out/ranks.json"
    ;;
*)
    echo "PART $part is not one of bars, tails, surface, house, mixed, kv, blocks, gemma, formats, latent, new, ranks." >&2
    exit 2
    ;;
esac
for name in $names; do
    echo "== $name"
    tail -n 40 "$out/$name.txt" | cut -c1-300
done
