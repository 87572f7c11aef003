#!/bin/sh
# Parts of on_gpu.sh on a host of several GPUs, one GPU each, side by side:
#
#   sh benchmarks/lanes.sh OUT LANE…      LANE: one GPU's parts, as "gemma MODELS=31b; new"
#
# OUT/N.txt holds the output of lane N; the ends of all of them are printed last.
set -u
out=${1:?OUT: a folder for results}
shift
here=$(dirname "$0")
mkdir -p "$out"
number=0
for lane in "$@"; do
    (
        export CUDA_VISIBLE_DEVICES=$number
        echo "$lane" | tr ';' '\n' | while read -r part settings; do
            env $settings sh "$here/on_gpu.sh" "$part" "$out/$number-$part"
        done >"$out/$number.txt" 2>&1
    ) &
    number=$((number + 1))
done
wait
tail -n 60 "$out"/[0-9].txt
