#!/bin/sh
# Installs onnxtrain from wheels into a bare Debian without a compiler, and runs there what README.md shows:
#
#     .ci/fresh_install.sh WHEELS [SUITE]
#
# WHEELS is a folder with the wheels of onnxtrain (built with ONNXTRAIN_RELEASE=1) and onnxtrain-kernels, and perhaps of
# a PyTorch for the CPU, which is then taken (that of PyPI brings CUDA, several GB). SUITE is a release of Debian with
# Python 3.11 or newer, by default bookworm. It needs root and debootstrap. The system lies and stays below
# /var/tmp/onnxtrain-fresh (or FRESH_ROOT).
set -eu
[ $# -ge 1 ] || { sed -n '2,9s/^# \?//p' "$0" >&2; exit 2; }
wheels=$(realpath "$1")
suite=${2:-bookworm}
cd "$(dirname "$0")/.."
root=${FRESH_ROOT:-/var/tmp/onnxtrain-fresh}/$suite

if [ ! -e "$root/.complete" ]; then
  rm -rf "$root"
  mkdir -p "$root"
  debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "$suite" "$root" >"$root.log"
  touch "$root/.complete"
fi
# The network of this machine, and the certificates that it trusts.
cp /etc/resolv.conf "$root/etc/resolv.conf"
cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
rm -rf "$root/wheels" "$root/fresh" "$root/page"
mkdir -p "$root/wheels" "$root/page/.ci" "$root/page/tests"
cp "$wheels"/*.whl "$root/wheels/"
# What the page needs to run: no source of onnxtrain.
cp README.md "$root/page/"
cp .ci/readme_blocks.py "$root/page/.ci/"
cp tests/pages.py "$root/page/tests/"
mount -t proc proc "$root/proc"
trap 'umount "$root/proc"' EXIT

inside() { env -u PIP_FIND_LINKS -u PYTHONPATH -u VIRTUAL_ENV HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin chroot "$root" "$@"; }
install() { # REQUIREMENT
  start=$(date +%s)
  inside /fresh/bin/pip install --quiet --disable-pip-version-check --no-cache-dir --find-links /wheels "$1"
  echo "pip install '$1': $(($(date +%s) - start)) s, then $(du -sm "$root/fresh" | cut -f1) MB"
}

for compiler in cc gcc c++ g++ clang cmake make; do
  if inside sh -c "command -v $compiler" >/dev/null; then
    echo "$root has a compiler ($compiler), which this script is to do without" >&2
    exit 1
  fi
done
echo "$(inside sh -c '. /etc/os-release; echo "$PRETTY_NAME"; ldd --version | head -1; python3 --version' | tr '\n' ' '), no compiler"
inside python3 -m venv /fresh
echo "python3 -m venv: $(du -sm "$root/fresh" | cut -f1) MB"
install onnxtrain
inside /fresh/bin/python -c 'import onnxtrain_kernels; print("native kernels of level", onnxtrain_kernels.level())'
install 'onnxtrain[demo]'
for torch in "$root"/wheels/torch-*.whl; do
  if [ -e "$torch" ]; then install "/wheels/${torch##*/}"; fi
done
install 'onnxtrain[demo,torch]'
start=$(date +%s)
inside sh -c 'cd /tmp && /fresh/bin/onnxtrain demo --output demo-output >demo.log 2>&1 || { cat demo.log; exit 1; }'
echo "onnxtrain demo: $(($(date +%s) - start)) s"
inside /fresh/bin/python /page/.ci/readme_blocks.py
