{{- define "volley.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "volley.labels" -}}
app.kubernetes.io/name: volley
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{/* Which pods: call with (list $ "head"). */}}
{{- define "volley.selector" -}}
app.kubernetes.io/name: volley
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* The image of a role: call with (list $ "actor-cuda"). */}}
{{- define "volley.image" -}}
{{- with (index . 0).Values.image -}}
{{ .repository }}:{{ .tag }}-{{ index $ 1 }}
{{- end -}}
{{- end -}}

{{- define "volley.redisAddress" -}}
{{- .Values.redis.external | default (printf "%s-redis:6379" (include "volley.name" .)) -}}
{{- end -}}

{{- define "volley.redisSecret" -}}
{{- .Values.redis.existingSecret | default (printf "%s-redis" (include "volley.name" .)) -}}
{{- end -}}

{{- define "volley.tokenSecret" -}}
{{- .Values.api.existingTokenSecret | default (printf "%s-api" (include "volley.name" .)) -}}
{{- end -}}

{{- define "volley.claim" -}}
{{- .Values.storage.existingClaim | default (printf "%s-runs" (include "volley.name" .)) -}}
{{- end -}}

{{/* The restricted standard, for a pod. */}}
{{- define "volley.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.podSecurity.user }}
runAsGroup: {{ .Values.podSecurity.group }}
fsGroup: {{ .Values.podSecurity.group }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* The restricted standard, for a container. */}}
{{- define "volley.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end -}}

{{/* The environment of every Ray process. The token itself comes from KubeRay (authOptions). */}}
{{- define "volley.rayEnvironment" -}}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_ENABLE_UV_RUN_RUNTIME_ENV, value: "0"}
- {name: RAY_worker_niceness, value: "0"}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end -}}
