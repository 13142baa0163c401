#!/usr/bin/env bash
# Create .env from example.env, with new secrets. An existing .env is kept.
set -euo pipefail
cd "$(dirname "$0")"
if [ -e .env ]; then
    echo ".env exists already; it is kept"
    exit 0
fi
umask 077
while IFS= read -r line; do
    case $line in
    RAY_AUTH_TOKEN= | REDIS_PASSWORD= | VOLLEY_ADMIN_TOKEN=) line+=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n') ;;
    esac
    printf '%s\n' "$line"
done <example.env >.env
echo ".env has been written; show the API's token with: grep VOLLEY_ADMIN_TOKEN .env"
