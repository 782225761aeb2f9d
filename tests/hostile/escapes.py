"""What programs, systems and statements try: generators of code, nothing that is stored.

Each code says on a line what it has got hold of, `nothing` if nothing.
"""

from __future__ import annotations

from tasks.sandbox import CLONE, KEYS, PROCESSOR, UNSHARE

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


SOCKETS_TO_THE_HOST = "print socket(my $s, 40, 1, 0) ? qq(made\\n) : qq(nothing\\n)"

RINGS = "my $x = qq(\\0) x 256; print syscall(425, 8, $x) >= 0 ? qq(made\\n) : qq(nothing\\n)"

NAMESPACES = f"""
for my $flags (0x10000000, 0x10020000) {{
    print "unshared\\n" if syscall({UNSHARE}, $flags) == 0;
    my $wanted = pack "Q8", $flags, 0, 0, 0, 17, 0, 0, 0;
    for my $child (syscall({CLONE}, $flags | 17, 0, 0, 0, 0), syscall(435, $wanted, 64)) {{
        exit unless $child;
        print "cloned\\n" if $child > 0;
    }}
}}
print "nothing\\n"
"""

TRACE = (101, 61) if PROCESSOR == 0xC000003E else (117, 260)  # ptrace, wait4

# Lies in wait for the next process of the system, which may have more rights at its beginning
HUNTER = f"""
my ($trace, $wait) = {TRACE};
my ($next, $said) = ($$ + 1, "");
open my $ready, ">", "/tmp/ready"; close $ready;
until (-e "/tmp/over") {{
    for my $n (1 .. 2000) {{ for my $p ($next .. $next + 3) {{
        next if syscall($trace, 0x4206, $p, 0, 0) or syscall($trace, 0x4207, $p, 0, 0);
        syscall($wait, $p, 0, 0x40000000, 0);
        open my $status, "<", "/proc/$p/status" or next;
        my ($rights) = map /CapEff:\\s*(\\w+)/, <$status>;
        $said = "held\\n" if hex(substr $rights, -8) & 1 << 21;
        kill 9, $p; syscall($wait, $p, 0, 0x40000000, 0); $next = $p + 1;
    }} }}
    opendir my $all, "/proc"; my $last = (sort {{ $a <=> $b }} grep /^\\d+$/, readdir $all)[-1];
    $next = $last + 1 if $last >= $next;
}}
open my $found, ">", "/tmp/found"; print $found $said, "nothing\\n";
"""

FILL_MEMORY = """
for place in /srv /mnt /dev/shm /tmp; do
    mount -t tmpfs -o size=2g none $place 2> /dev/null && echo mounted $place
    unshare --mount mount -t tmpfs -o size=2g none $place 2> /dev/null && echo mounted $place
done
for place in /srv /mnt /dev/shm /tmp; do
    head -c 200M /dev/zero > $place/a; head -c 200M /dev/zero > $place/b
done 2> /dev/null
for place in /srv /mnt /dev/shm /tmp; do cat $place/[ab]; done | wc -c
"""

FILL_INODES = """
cd /dev/shm; perl -e 'for (1..150000) { open my $f, ">$_" or last }'; ls -f | wc -l
"""

REPLACE_PROGRAMS = """
for name in perl setpriv choom bash; do
    printf '#!/bin/sh\\nmount -t tmpfs none /srv && echo mounted\\n' > /usr/bin/$name.new
    chmod 755 /usr/bin/$name.new
done
mv /usr/bin/perl.new /usr/bin/perl; mv /usr/bin/setpriv.new /usr/bin/setpriv
mv /usr/bin/choom.new /usr/bin/choom; echo replaced
"""
