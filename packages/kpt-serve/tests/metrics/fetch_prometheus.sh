#!/bin/sh
# Fetches Prometheus and promtool of Debian into a folder, without root; prints the folder for KPT_PROMETHEUS.
#
#     export KPT_PROMETHEUS=$(sh fetch_prometheus.sh /tmp/prometheus)
set -eu
into=${1:?"fetch_prometheus.sh: give the folder to fetch Prometheus into, for example /tmp/prometheus"}
if [ ! -x "$into/usr/bin/promtool" ]; then
    mkdir -p "$into"
    cd "$into"
    apt-get download -q prometheus >&2 || {
        echo "fetch_prometheus.sh: apt-get found no package prometheus: run apt-get update on Debian or Ubuntu" >&2
        exit 1
    }
    dpkg -x prometheus_*.deb .
    rm prometheus_*.deb
fi
echo "$into/usr/bin"
