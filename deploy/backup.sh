#!/usr/bin/env bash
# Copy the folder of a stack (`volley up --dir`, or ~/.volley) while it is up, so that copied back it goes on.
#
#   deploy/backup.sh ~/.volley /backup/monday        to restore: volley down, put the copy in the folder's place, volley up
#
# Run folders come before Redis: what Redis knows is then never older than the checkpoints it is about.
set -euo pipefail
[ $# = 2 ] || { sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2; }
home=$1 copy=$2
[ -d "$home/runs" ] && [ -d "$home/redis" ] || { echo "backup: $home is no folder of a stack: it has no runs/ or redis/" >&2; exit 1; }
[ ! -e "$copy" ] || { echo "backup: $copy is there already: choose another folder" >&2; exit 1; }

umask 077 # samples, and tokens
aside=$copy.partial
rm -rf "$aside"
mkdir -p "$aside/redis"

# A checkpoint that appears or is removed meanwhile is no error (1): each is complete or absent, and the newest one that
# was there at the beginning stays for as long as two more are written.
set +e
tar -C "$home" --warning=none --exclude='.*.partial' --exclude='.lock' -cf - runs | tar -C "$aside" -xpf -
ends=${PIPESTATUS[*]}
set -e
[[ $ends = [01]" 0" ]] || { echo "backup: the run folders could not be copied" >&2; exit 1; }

cp "$home"/redis/appendonly* "$aside/redis/" # a last command cut off in its writing is dropped when it is read
[ ! -e "$home/admin.token" ] || cp "$home/admin.token" "$aside/"
mv "$aside" "$copy"
