#!/usr/bin/env bash
# Boots the virtual machine, runs a command in it as root, prints what it prints, and ends with its status; with 125 when
# the guest gave none.
# usage: run.sh [--memory MIB] [--nvdimm FILE] [--nvme FILE:BYTES]... [--nvme-log FILE] [--kill-at TEXT] COMMAND
#   --memory MIB       gives the guest so much memory, by default 1536
#   --nvdimm FILE      gives the guest this file as persistent memory; its length is a multiple of 16 MiB
#   --nvme FILE:BYTES  gives the guest this file as an NVMe disk with logical blocks of so many bytes: the first one is
#                      /dev/nvme0n1, the second one /dev/nvme0n2
#   --nvme-log FILE    logs every write and flush of the first NVMe disk in this file (QEMU's blklogwrites)
#   --kill-at TEXT     kills the machine as soon as the command prints a line that begins with TEXT, and ends with 137
set -uo pipefail
memory_mib=1536
nvdimm='' nvme=() nvme_log='' kill_at=''
while [[ $1 == --* ]]; do
    case $1 in
        --memory) memory_mib=$2 ;;
        --nvdimm) nvdimm=$2 ;;
        --nvme) nvme+=("$2") ;;
        --nvme-log) nvme_log=$2 ;;
        --kill-at) kill_at=$2 ;;
        *) echo "unknown option: $1" >&2 && exit 2 ;;
    esac
    shift 2
done
share=$(mktemp -d)
trap 'rm -rf "$share"' EXIT
printf '%s\n' "$1" >"$share/command.sh"
cat >"$share/guest.sh" <<'GUEST'
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
ln -sf /proc/self/fd /dev/fd
ip link set lo up
ulimit -l unlimited
cd /share
touch /share/begun
setsid bash /share/command.sh >/dev/ttyS1 2>&1 </dev/null
echo $? >/share/status
sync
echo o >/proc/sysrq-trigger
sleep 60
GUEST
machine=q35 memory=${memory_mib}M persistent=() disks=()
if [ -n "$nvdimm" ]; then
    # The guest may address the module's memory beyond its own.
    machine+=,nvdimm=on
    memory+=,slots=1,maxmem=$((memory_mib + 4096))M
    persistent=(-object "memory-backend-file,id=nvdimm,share=on,mem-path=$nvdimm,size=$(stat -c %s "$nvdimm")"
        -device nvdimm,memdev=nvdimm)
fi
for ((i = 0; i < ${#nvme[@]}; i++)); do
    ((i)) || disks=(-device nvme,id=nvme,serial=kvdepot)
    file=${nvme[i]%:*} block=${nvme[i]##*:}
    drive=driver=file,filename=$file
    if ((i == 0)) && [ -n "$nvme_log" ]; then
        drive=driver=blklogwrites,file.driver=file,file.filename=$file,log.driver=file,log.filename=$nvme_log
    fi
    # A volatile write cache: the guest's writes are complete when the host's page cache has them, its flushes when the disk has.
    disks+=(-drive "if=none,id=disk$i,cache=writeback,discard=unmap,$drive"
        -device "nvme-ns,bus=nvme,nsid=$((i + 1)),drive=disk$i,logical_block_size=$block,physical_block_size=$block")
done

# No hardware acceleration: it is not to be had everywhere, and where it is, not every machine emulates all it needs.
# Without la57, smap and smep the emulated processor boots in a third of the time. no_timer_check: the kernel expects a number of
# timer interrupts within a time that an emulated processor of a busy machine does not keep.
boot() {
    [ -z "$nvme_log" ] || : >"$nvme_log"
    exec qemu-system-x86_64 -nodefaults -no-reboot -display none -machine "$machine" -pidfile "$share/qemu.pid" \
        -accel tcg,thread=multi,tb-size=512 -cpu max,-la57,-smap,-smep -smp 2 -m "$memory" \
        -kernel "$VM_DIR/vmlinux" -initrd "$VM_DIR/initrd.gz" \
        -append "console=ttyS0 quiet panic=-1 mitigations=off nokaslr no_timer_check random.trust_cpu=on tsc=reliable modules=$VM_DIR/kernel/lib/modules" \
        -serial "file:$share/kernel.log" -chardev stdio,id=out,signal=off -serial chardev:out \
        -fsdev local,id=root,path=/,security_model=none,readonly=on,multidevs=remap \
        -device virtio-9p-pci,fsdev=root,mount_tag=hostroot \
        -fsdev "local,id=share,path=$share,security_model=none,multidevs=remap" \
        -device virtio-9p-pci,fsdev=share,mount_tag=share \
        "${persistent[@]}" "${disks[@]}" </dev/null
}

# Prints what the guest prints, and kills the machine at the line that is waited for.
follow() {
    local line
    while IFS= read -r line; do
        line=${line%$'\r'}
        printf '%s\n' "$line"
        if [ -n "$kill_at" ] && [[ $line == "$kill_at"* ]]; then
            touch "$share/killed"
            kill -KILL "$(cat "$share/qemu.pid")"
        fi
    done
}

# A kernel that does not come to the command says nothing about what is tested; it is started again.
for attempt in 1 2 3; do
    # The shell would report the machine's end by a signal on standard error.
    { { (boot 2>&3) | follow; } 2>/dev/null; } 3>&2
    [ ! -e "$share/begun" ] || break
    echo "the virtual machine did not start (attempt $attempt of 3); the end of its kernel's log:" >&2
    tail -n 20 "$share/kernel.log" >&2
done
[ ! -e "$share/killed" ] || exit 137
if [ ! -e "$share/status" ]; then
    echo "the virtual machine ended without a status; the end of its kernel's log:" >&2
    tail -n 20 "$share/kernel.log" >&2
    exit 125
fi
exit "$(cat "$share/status")"
