#!/usr/bin/env bash
# Run the Dockerfile's install steps for one role in a clean folder, on machines that cannot build images: an environment
# from the role's lock, Volley's wheel, the imports of the role's process, and the health check's tools.
#
#   deploy/docker/try.sh head        or reward, actor-cpu, learner-cpu, all-cpu
set -euo pipefail
cd "$(dirname "$0")/../.."
UV=${UV:-$PWD/.venv/bin/uv}
role=${1:-}
case "$role" in
    head) modules="services.runs.driver services.api.serve services.stack.keeper services.cli" ;;
    reward) modules="reward_servers.worker reward_servers.http" ;;
    actor-cpu) modules="actors.actor actors.engine" ;;
    learner-cpu) modules="learner.rank learner.engine" ;;
    all-cpu) modules="services.runs.driver reward_servers.worker actors.engine learner.engine" ;;
    *) sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac

clean=$(mktemp -d)
trap 'rm -rf "$clean"' EXIT
sources=$(sed -n 's/^COPY \(pyproject.*\) \.\/$/\1/p; s/^COPY \([a-z_]*\) \1$/\1/p' deploy/docker/Dockerfile)
mkdir "$clean/src"
# shellcheck disable=SC2086 # file names without spaces, to be split into words
cp -r $sources "$clean/src/"
export VIRTUAL_ENV=$clean/volley UV_LINK_MODE=copy UV_COMPILE_BYTECODE=0 DS_BUILD_OPS=0
"$UV" venv -q --python 3.11 "$VIRTUAL_ENV"
torch=$(grep '^torch==' "deploy/locks/$role.txt" || true)
if [ -n "$torch" ]; then
    "$UV" pip install -q --no-deps ${TORCH_INDEX:+--default-index "$TORCH_INDEX"} "$torch"
fi
"$UV" pip install -q --no-deps --require-hashes -c deploy/locks/dev.txt -r <(sed '/^torch==/d' "deploy/locks/$role.txt")
"$UV" build -q --wheel --out-dir "$clean/wheel" "$clean/src"
"$UV" pip install -q --no-deps "$clean"/wheel/*.whl

cd "$clean"
unset PYTHONPATH
for module in $modules; do
    DS_ACCELERATOR=cpu "$VIRTUAL_ENV/bin/python" -W ignore -c "import $module"
    echo "$role: imported $module"
done
if [ "$role" = head ]; then "$VIRTUAL_ENV/bin/volley" --help >/dev/null && echo "$role: volley --help works"; fi
echo "$role: $("$UV" pip list -q | tail -n +3 | wc -l) packages, $(du -sm "$VIRTUAL_ENV" | cut -f1) MiB"
