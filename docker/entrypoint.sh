#!/bin/sh
# Runs a dspark command as the container's one process, with CANN's libraries where the image has them.
for environment in /usr/local/Ascend/ascend-toolkit/set_env.sh /usr/local/Ascend/nnal/atb/set_env.sh; do
    # shellcheck disable=SC1090
    if [ -f "$environment" ]; then . "$environment"; fi
done
exec dspark "$@"
