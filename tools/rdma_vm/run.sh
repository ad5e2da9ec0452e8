#!/usr/bin/env bash
# Boots the virtual machine, runs a command in it as root, prints what it prints, and ends with its status; with 125 when
# the guest gave none.
# usage: run.sh COMMAND
set -uo pipefail
MEMORY_MIB=1536
share=$(mktemp -d)
trap 'rm -rf "$share"' EXIT
printf '%s\n' "$1" >"$share/command.sh"
cat >"$share/guest.sh" <<'GUEST'
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
ln -sf /proc/self/fd /dev/fd
ip link set lo up
ulimit -l unlimited
cd /share
setsid bash /share/command.sh >/dev/ttyS1 2>&1 </dev/null
echo $? >/share/status
sync
echo o >/proc/sysrq-trigger
sleep 60
GUEST
# No hardware acceleration: it is not to be had everywhere, and where it is, not every machine emulates all it needs.
# Without la57, smap and smep the emulated processor boots in a third of the time.
qemu-system-x86_64 -nodefaults -no-reboot -display none -machine q35 \
    -accel tcg,thread=multi,tb-size=512 -cpu max,-la57,-smap,-smep -smp 2 -m "$MEMORY_MIB" \
    -kernel "$VM_DIR/vmlinux" -initrd "$VM_DIR/initrd.gz" \
    -append "console=ttyS0 quiet panic=-1 mitigations=off nokaslr random.trust_cpu=on tsc=reliable modules=$VM_DIR/kernel/lib/modules" \
    -serial "file:$share/kernel.log" -chardev stdio,id=out,signal=off -serial chardev:out \
    -fsdev local,id=root,path=/,security_model=none,readonly=on,multidevs=remap \
    -device virtio-9p-pci,fsdev=root,mount_tag=hostroot \
    -fsdev "local,id=share,path=$share,security_model=none,multidevs=remap" \
    -device virtio-9p-pci,fsdev=share,mount_tag=share \
    </dev/null | tr -d '\r'
if [ ! -e "$share/status" ]; then
    echo "the virtual machine ended without a status; the end of its kernel's log:" >&2
    tail -n 20 "$share/kernel.log" >&2
    exit 125
fi
exit "$(cat "$share/status")"
