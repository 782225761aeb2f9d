"""What programs and systems try: generators of Perl and bash, nothing that is stored.

Each code says on a line what it has got hold of, `nothing` if nothing.
"""

from __future__ import annotations

from tasks.sandbox import CLONE, KEYS, PROCESSOR, SOCKET, UNSHARE

SECRET = "secret of the caller"


def give_a_secret() -> str:
    """Return code that gives its process a session keyring with a key that all may read."""
    return f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
joined = libc.syscall({KEYS + 2}, 1, 0)
key = libc.syscall({KEYS}, b"user", {SECRET!r}.encode(), b"hunter2", 7, ctypes.c_int(-3))
libc.syscall({KEYS + 2}, 5, key, 0x3f3f3f3f)
"""


def read_keys(key: int) -> str:
    """Return Perl code that reads a key by its number and by name, and lists those it may see."""
    return f"""
my ($text, $kind, $name, $mine, $x) = ("\\0" x 40, "user", "{SECRET}", "mine", "x");
print "read $text\\n" if syscall({KEYS + 2}, 11, {key}, $text, 40) > 0;
for my $ring (-1, -2, -3, -4, -5) {{
    print "found\\n" if syscall({KEYS + 2}, 10, $ring, $kind, $name, 0) > 0;
}}
print "requested\\n" if syscall({KEYS + 1}, $kind, $name, $x, -3) > 0;
print "added\\n" if syscall({KEYS}, $kind, $mine, $x, 1, -4) > 0;
open my $list, "<", "/proc/keys";
print grep /secret/, <$list>;
print "nothing\\n";
"""


HOST_SOCKETS = f"""
for my $family (40, 40 | 1 << 32) {{ print "made\\n" if syscall({SOCKET}, $family, 1, 0) >= 0 }}
print socket(my $s, 2, 1, 0) ? "nothing\\n" : "no network at all\\n";
"""

RINGS = "my $x = qq(\\0) x 256; print syscall(425, 8, $x) >= 0 ? qq(made\\n) : qq(nothing\\n)"

NAMESPACES = f"""
for my $flags (0x10000000, 0x10020000, 0x10000000 | 1 << 32) {{
    print "unshared\\n" if syscall({UNSHARE}, $flags) == 0;
    my $wanted = pack "Q8", $flags, 0, 0, 0, 17, 0, 0, 0;
    for my $child (syscall({CLONE}, $flags | 17, 0, 0, 0, 0), syscall(435, $wanted, 64)) {{
        exit unless $child;
        print "cloned\\n" if $child > 0;
    }}
}}
print "nothing\\n"
"""

TRACE = 101 if PROCESSOR == 0xC000003E else 117
TRACES = f"""
my $child = fork // die; if (!$child) {{ sleep 600; exit }}
print "traced\\n" if syscall({TRACE}, 0x4206, $child, 0, 0) == 0;
kill 9, $child; print "nothing\\n"
"""

# of other processors and of 32 bits, under which the same calls go
OTHER_NUMBERS = (
    "my $pid = syscall(1 << 30 | 39); print $pid > 0 ? qq(called $pid\\n) : qq(nothing\\n)"
)

MOUNTS = """
for place in /srv /mnt /dev/shm /tmp; do
    mount -t tmpfs -o size=2g none $place && echo mounted $place
    unshare --mount mount -t tmpfs -o size=2g none $place && echo mounted $place
done 2> /dev/null
for device in vda sda nvme0n1; do mount /dev/$device /mnt 2> /dev/null && echo mounted; done
umount /proc 2> /dev/null && echo unmounted
echo nothing
"""

# the settings and the time that are there are set again: nothing would change where it succeeded
SETTINGS = """
for name in panic core_pattern hostname ../vm/overcommit_memory; do
    value=$(cat /proc/sys/kernel/$name)
    ( echo "$value" > /proc/sys/kernel/$name ) 2> /dev/null && echo set $name
done
for kind in b c; do mknod /tmp/d $kind 8 0 2> /dev/null && echo made $kind; done
date --set "@$(date +%s.%N)" > /dev/null 2>&1 && echo set the clock
head -c 1 /proc/kcore 2> /dev/null | wc -c | grep -v '^0'
echo 1 2> /dev/null > /sys/fs/cgroup/memory/memory.limit_in_bytes && echo set a limit
echo nothing
"""

FORKS = """
$| = 1; my $n = 0;
for my $k (1 .. 400) {
    my $pid = fork;
    last unless defined $pid;
    if (!$pid) { $) = $( = $k; $< = $> = 1000 + $k; sleep 600; exit }
    $n++;
}
print "$n\\n";
"""

BOMB = "bomb() { bomb | bomb & }; bomb; sleep 600"

FILL_DISK = """
for place in /tmp /srv /mnt /dev/shm /dev /; do
    head -c 400M /dev/zero > $place/a; head -c 400M /dev/zero > $place/b
done 2> /dev/null
for name in hostname hosts resolv.conf; do head -c 400M /dev/zero > /etc/$name; done 2> /dev/null
head -c 400M /dev/zero 2> /dev/null > /run/.containerenv
cat /{tmp,srv,mnt,dev/shm,dev,.}/[ab] /etc/host* /run/.containerenv 2> /dev/null | wc -c
"""

FILL_INODES = """
cd /dev/shm; perl -e 'for (1 .. 150000) { open my $f, ">$_" or last }'; ls -f | wc -l
"""

FILL_MEMORY = "perl -e '$x = qq(a) x (9 << 30); print qq(taken\\n)' 2> /dev/null; echo over"

REPLACE_PROGRAMS = """
for name in perl setpriv choom bash timeout; do
    printf '#!/bin/sh\\nmount -t tmpfs none /srv && echo mounted\\n' > /usr/bin/$name.new
    chmod 755 /usr/bin/$name.new
done
for name in perl setpriv choom; do mv /usr/bin/$name.new /usr/bin/$name; done; echo replaced
"""
