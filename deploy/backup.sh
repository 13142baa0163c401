#!/usr/bin/env bash
# Copy the folder of a stack (`volley up --dir`, or ~/.volley) while it is up. Restored, the copy resumes its runs.
#
#   deploy/backup.sh ~/.volley /backup/monday        to restore: volley down, put the copy in the folder's place, volley up
#
# Run folders are copied before Redis, so that Redis is never older than the checkpoints it describes.
set -euo pipefail
[ $# = 2 ] || { sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2; }
home=$1 copy=$2
[ -d "$home/runs" ] && [ -d "$home/redis" ] || { echo "backup: $home is not a stack's folder: runs/ or redis/ is missing" >&2; exit 1; }
[ ! -e "$copy" ] || { echo "backup: $copy exists already: choose another folder" >&2; exit 1; }

umask 077 # samples, and tokens
aside=$copy.partial
rm -rf "$aside"
mkdir -p "$aside/redis"

# A checkpoint that appears or disappears meanwhile is not an error (1): each is complete or absent, and the newest one at
# the beginning stays until two more are written.
set +e
tar -C "$home" --warning=none --exclude='.*.partial' --exclude='.lock' -cf - runs | tar -C "$aside" -xpf -
ends=${PIPESTATUS[*]}
set -e
[[ $ends = [01]" 0" ]] || { echo "backup: the run folders could not be copied" >&2; exit 1; }

cp "$home"/redis/appendonly* "$aside/redis/" # Redis drops a truncated last command when it loads the file
[ ! -e "$home/admin.token" ] || cp "$home/admin.token" "$aside/"
mv "$aside" "$copy"
