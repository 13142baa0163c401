#!/usr/bin/env bash
# Make .env from example.env, with secrets of its own. One that is there stays.
set -euo pipefail
cd "$(dirname "$0")"
if [ -e .env ]; then
    echo ".env is there already; it stays as it is"
    exit 0
fi
umask 077
while IFS= read -r line; do
    case $line in
    RAY_AUTH_TOKEN= | REDIS_PASSWORD= | VOLLEY_ADMIN_TOKEN=) line+=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n') ;;
    esac
    printf '%s\n' "$line"
done <example.env >.env
echo ".env is written; the API's token: grep VOLLEY_ADMIN_TOKEN .env"
