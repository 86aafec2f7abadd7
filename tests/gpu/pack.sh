#!/usr/bin/env bash
# Packs compiled tests, the command and the fixtures for a machine that has a GPU and no Rust toolchain.
#
# usage: tests/gpu/pack.sh OUT.tar.xz TEST...     (names of integration tests; needs `cargo test --no-run` to have built them)
# There: unpack, then tests/gpu/run.sh.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$1
shift
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
mkdir -p "$stage/bin"
for test in "$@"; do
    binary=$(cargo test --no-run --message-format=json --test "$test" 2>/dev/null |
        python3 -c "import json,sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get('executable') and message['target']['name'] == '$test': print(message['executable'])")
    strip -o "$stage/bin/$test" "$binary"
done
strip -o "$stage/bin/capstan" target/debug/capstan
# Tests find their checkout and the fixtures beside it by the path they were built at.
echo "$PWD" >"$stage/root"
tar -C .. -cf "$stage/fixtures.tar" shared/fixtures
tar -C "$stage" -cf - bin root fixtures.tar | xz -T0 -3 >"$out"
ls -l "$out"
