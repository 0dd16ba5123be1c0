#!/usr/bin/env bash
# Builds an image where no base image can be pulled: mmdebstrap makes the base of Debian's packages, and podman (or
# buildah, if BUILDER names it) runs the steps of the Dockerfile. The steps see the mirrors, folders and certificates
# that this machine's apt and pip are set up with.
#
#   docker/from_debian.sh TARGET NAME [ARGUMENT OF THE BUILD ...]
#
# `podman save --format oci-archive NAME` then writes an OCI image.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=$1 name=$2
shift 2
builder=${BUILDER:-podman}
base=localhost/headrace-base:bookworm
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

if ! podman image exists "$base"; then
  apt-config dump Acquire > "$folder/apt.conf"
  printf 'path-exclude=/usr/share/%s/*\n' doc info locale lintian man > "$folder/dpkg.cfg"
  mmdebstrap --variant=minbase --aptopt="$folder/apt.conf" --dpkgopt="$folder/dpkg.cfg" \
    --customize-hook='rm -rf "$1"/var/lib/apt/lists/*' bookworm "$folder/base.tar"
  podman import --quiet "$folder/base.tar" "$base"
fi

# pip's settings as one file, in which this machine's paths stand below /run/host, where the build sees them.
mounts=()
{
  echo '[global]'
  python3 -m pip config list | sed -nE "s/^(:env:|global)\.([a-z-]+)='(.*)'$/\2 = \3/p" | awk '!seen[$1]++' |
    sed -E 's#(=| |file://)(/[^ ]*)#\1/run/host\2#g'
} > "$folder/pip.conf"
# An index on disk names files beside it.
for path in $(grep -oE '(file://)?/run/host/[^ ]*' "$folder/pip.conf" | sed -E 's#^file://(.*)/[^/]+/?$#\1#'); do
  mounts+=(--volume "${path#/run/host}:$path:ro")
done

# OCI's own format has no HEALTHCHECK.
"$builder" build --format docker --isolation chroot --network host --file docker/Dockerfile --target "$target" --tag "$name" \
  --build-arg BASE="$base" --volume "$folder/pip.conf:/etc/pip.conf:ro" "${mounts[@]}" "$@" .
