#!/usr/bin/env bash
# Unpacks what pack.sh packed and runs it on this machine's GPU: every test binary, then the commands.
#
# usage: tests/gpu/run.sh PACK.tar.xz LOG DEVICE      (DEVICE: cuda or hip)
# A failing test does not end the run; the last lines say what passed.
set -uo pipefail
pack=$1 log=$2 device=$3
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
tar -C "$work" -xJf "$pack"
root=$(cat "$work/root")
mkdir -p "$(dirname "$root")"
[ -e "$root" ] || ln -s "$PWD" "$root"
# The link's `..` is this checkout's parent.
tar -C .. -xf "$work/fixtures.tar"
fixtures="$(cd .. && pwd)/shared/fixtures"
export CAPSTAN_DEVICE=$device CAPSTAN_CACHE="$work/cache"
if [ -z "${CAPSTAN_NVRTC:-}" ]; then
    CAPSTAN_NVRTC=$(find / -name 'libnvrtc.so.1[23]*' -not -name '*alt*' -not -path '/proc/*' 2>/dev/null | head -1)
    export CAPSTAN_NVRTC
fi
{ date -u; nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader; echo "NVRTC $CAPSTAN_NVRTC"; } >"$log"
summary=()
step() {
    local name=$1 limit=$2 start=$SECONDS
    shift 2
    echo "== $name: $*" >>"$log"
    timeout "$limit" "$@" >>"$log" 2>&1
    summary+=("$name: exit $?, $((SECONDS - start)) s")
}
capstan="$work/bin/capstan"
step devices 60 "$capstan" devices --self-test --device "$device"
for test in conformance kernels_gpu verify selftest executor model_chain verify_model no_alloc soak; do
    [ -x "$work/bin/$test" ] && step "$test" "${LIMIT:-90}" "$work/bin/$test" --test-threads 1
done
step verify-command 60 bash -c "'$capstan' verify --device $device '$fixtures'/indexer/*.safetensors"
step run 60 "$capstan" run --device "$device"
step demo 60 "$capstan" demo --device "$device"
step bench 60 "$capstan" bench --device "$device"
step dump 60 "$capstan" dump --device "$device"
{ echo "== summary"; printf '%s\n' "${summary[@]}"; } | tee -a "$log"
