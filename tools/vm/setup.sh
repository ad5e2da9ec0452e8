#!/usr/bin/env bash
# Prepares the virtual machine under $VM_DIR: kernel, modules, and an initial file system that boots this machine's own
# root directory, read-only, under a layer of memory. So every program and library of this machine is in the guest.
# The last line on standard error says what is missing.
# usage: setup.sh [PACKAGE...], Debian packages that the guest's command needs
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
packages=(qemu-system-x86 seabios busybox-static cpio kmod zstd "$@")
mkdir -p "$VM_DIR"
cd "$VM_DIR"

fail() {
    echo "$1" >&2
    exit 1
}

[ "$(uname -m)" = x86_64 ] || fail "the virtual machine is made for x86_64 only"
command -v dpkg >/dev/null || fail "packages are installed on Debian only"
missing=()
for package in "${packages[@]}"; do
    dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
done
if ((${#missing[@]})); then
    [ "$(id -u)" = 0 ] || fail "missing packages, and not root to install them: ${missing[*]}"
    apt-get update -qq || fail "apt-get update failed"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null ||
        fail "packages cannot be installed: ${missing[*]}"
fi
[ -e ready ] && exit 0

# The distribution's ordinary kernel: its cloud kernel lacks rdma_rxe.
package=$(apt-cache depends linux-image-amd64 2>/dev/null | awk '/Depends: linux-image/ { print $2; exit }')
[ -n "$package" ] || fail "apt knows no kernel package"
version=${package#linux-image-}
rm -rf kernel initrd
apt-get download -qq "$package" 2>/dev/null || fail "the kernel package cannot be downloaded: $package"
dpkg -x "$package"_*.deb kernel
rm -f "$package"_*.deb
[ -e kernel/lib ] || ln -s usr/lib kernel/lib
depmod -b kernel "$version"

mkdir -p initrd/{bin,modules,proc,sys,dev,lower,upper,new}
cp /bin/busybox initrd/bin/
modprobe -C /dev/null -d kernel -S "$version" -a --show-depends virtio_pci 9pnet_virtio 9p overlay |
    awk '$1 == "insmod" && !seen[$2]++ { print $2 }' | while read -r module; do
    name=$(basename "$module")
    case $name in
        *.xz) name=${name%.xz} && xz -dc "$module" >"initrd/modules/$name" ;;
        *.zst) name=${name%.zst} && zstd -qdc "$module" >"initrd/modules/$name" ;;
        *) cp "$module" initrd/modules/ ;;
    esac
    echo "$name" >>initrd/modules/order
done
cp "$here/init.sh" initrd/init
chmod +x initrd/init
(cd initrd && find . | cpio -o -H newc --quiet | gzip -1) >initrd.gz
rm -rf initrd

# Uncompressed, because an emulated processor takes longer to unpack a kernel than to boot it.
python3 - "kernel/boot/vmlinuz-$version" vmlinux <<'PYTHON'
import lzma, struct, subprocess, sys

image = open(sys.argv[1], "rb").read()
start = (image[0x1F1] + 1) * 512 + struct.unpack_from("<I", image, 0x248)[0]
packed = image[start : start + struct.unpack_from("<I", image, 0x24C)[0]]
if packed.startswith(b"\xfd7zXZ\0"):
    packed = lzma.LZMADecompressor(format=lzma.FORMAT_XZ).decompress(packed)
elif packed.startswith(b"\x28\xb5\x2f\xfd"):
    packed = subprocess.run(["zstd", "-dcq"], input=packed, stdout=subprocess.PIPE, check=True).stdout
open(sys.argv[2], "wb").write(packed)
PYTHON
touch ready
