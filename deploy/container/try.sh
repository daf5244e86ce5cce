#!/usr/bin/env bash
# Build a package's image without a registry, run its server in it, ask for one inference, and stop it.
#   deploy/container/try.sh PACKAGE WHEELS      PACKAGE has one input of FP32; WHEELS holds all that pip is to install
# As root on Debian 12, with buildah and mmdebstrap; `kpt` and curl are on the path. The server runs without isolation of
# its network, and its root may be written to: buildah's chroot is no Kubernetes.
set -euo pipefail
package=$(realpath "$1") wheels=$(realpath "$2") port=18085
work=$(mktemp -d)
cd "$work"
build() { buildah --storage-driver vfs --root "$work/storage" --runroot "$work/run" "$@"; }
trap 'kill "${server:-}" 2>/dev/null || true; build rm --all >/dev/null 2>&1 || true; rm -rf "$work"' EXIT

# A base image: Debian's own Python, with pip, which may write beside Debian's packages.
mmdebstrap --quiet --variant=minbase --include=python3,python3-pip bookworm rootfs.tar
mkdir base && mv rootfs.tar base/
printf 'FROM scratch\nADD rootfs.tar /\nENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_INDEX=1\n' >base/Containerfile
build bud --quiet --isolation chroot -t localhost/base:1 base

kpt export --manifests out "$package" --image localhost/served:1 --base localhost/base:1 >/dev/null
build bud --quiet --isolation chroot --volume "$wheels:/wheels:ro" --build-arg PIP_FIND_LINKS=/wheels \
    -f out/Containerfile -t localhost/served:1 "$package"
container=$(build from localhost/served:1)
echo "built localhost/served:1: $(build inspect --type image --format '{{.OCIv1.Config.Entrypoint}}' localhost/served:1)"

# The image's own command, on a port that is free here, and without gRPC.
mapfile -t command < <(sed -n 's/^ENTRYPOINT //p' out/Containerfile | python3 -c 'import json, sys
words = json.load(sys.stdin)
words[words.index("--port") + 1] = sys.argv[1]
at = words.index("--grpc-port")
print("\n".join(words[:at] + words[at + 2 :]))' "$port")
build run --isolation chroot --env KPT_TOKEN=secret "$container" -- "${command[@]}" &
server=$!
timeout 120 sh -c "until curl -fs http://127.0.0.1:$port/v2/health/ready >/dev/null; do sleep 1; done"
python3 - "$package" "$port" <<'PYTHON'
import json, math, sys, urllib.error, urllib.request
manifest = json.load(open(sys.argv[1] + "/kpt-package.json"))
given = manifest["inputs"][0]
shape = [max(size, 1) for size in given["shape"]]
tensor = {"name": given["name"], "datatype": given["datatype"], "shape": shape, "data": [0.5] * math.prod(shape)}
url = f"http://127.0.0.1:{sys.argv[2]}/v2/models/{manifest['name']}/infer"
body = json.dumps({"inputs": [tensor]}).encode()
for token, code in ("wrong", 401), ("secret", 200):
    request = urllib.request.Request(url, body, {"Authorization": f"Bearer {token}", "Content-Type": "application/json"})
    try:
        answer = urllib.request.urlopen(request)
    except urllib.error.HTTPError as error:
        answer = error
    assert answer.status == code, (answer.status, answer.read())
output = json.load(answer)["outputs"][0]
assert all(map(math.isfinite, output["data"]))
print("answered:", output["name"], output["shape"], output["data"][:3])
PYTHON
pid=$(pgrep -f -- "kpt serve /models --host 0.0.0.0 --port $port" | tail -1)
echo "runs as uid $(stat -c %u "/proc/$pid")"
kill -TERM "$pid"
wait "$server"
echo "stopped with 0"
server=
