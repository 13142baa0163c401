"""A cluster that starts with no node for any role: a run that waits for room makes Ray's autoscaler add the nodes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

