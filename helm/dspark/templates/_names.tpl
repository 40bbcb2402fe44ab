{{/* Names and labels. Parts that concern one role take (dict "root" $ "role" "router"). */}}

{{- define "dspark.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Short enough for a role and a LeaderWorkerSet's own suffixes behind it. */}}
{{- define "dspark.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "dspark.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "dspark.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "dspark.roleName" -}}
{{ include "dspark.fullname" .root }}-{{ .role }}
{{- end -}}

{{/* Of the Service with an address per pod. A LeaderWorkerSet's controller makes one of its own with the set's name. */}}
{{- define "dspark.headlessName" -}}
{{ include "dspark.roleName" . }}-pods
{{- end -}}

{{- define "dspark.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "dspark.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{/* What never changes, because Deployments cannot change their selectors. */}}
{{- define "dspark.releaseSelector" -}}
app.kubernetes.io/name: {{ include "dspark.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "dspark.selector" -}}
{{ include "dspark.releaseSelector" .root }}
app.kubernetes.io/component: {{ .role }}
{{- end -}}

{{- define "dspark.labels" -}}
{{ include "dspark.releaseSelector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: dspark
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "dspark.roleLabels" -}}
{{ include "dspark.labels" .root }}
app.kubernetes.io/component: {{ .role }}
{{- end -}}

{{/* Of pods: nothing that changes with the chart alone, or every upgrade of it would restart every worker. */}}
{{- define "dspark.podLabels" -}}
{{ include "dspark.selector" . }}
app.kubernetes.io/part-of: dspark
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The roles of this release, as a JSON list. */}}
{{- define "dspark.roles" -}}
{{- if .Values.prefill.enabled -}}["router","prefill","decode"]{{- else -}}["router","decode"]{{- end -}}
{{- end -}}

{{- define "dspark.workerRoles" -}}
{{- if .Values.prefill.enabled -}}["prefill","decode"]{{- else -}}["decode"]{{- end -}}
{{- end -}}

{{- define "dspark.image" -}}
{{- $image := (index .root.Values .role).image -}}
{{- $repository := list .root.Values.image.registry $image.repository | compact | join "/" -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $repository $image.digest -}}
{{- else if or $image.tag (eq .role "router") -}}
{{- printf "%s:%s" $repository ($image.tag | default .root.Chart.AppVersion) -}}
{{- else -}}
{{- printf "%s:%s-%s" $repository .root.Chart.AppVersion (include "dspark.accelerator" . | fromYaml).imageSuffix -}}
{{- end -}}
{{- end -}}

{{/* The preset of a worker role; of the router, which computes nothing, an empty one. */}}
{{- define "dspark.accelerator" -}}
{{- if eq .role "router" -}}{}{{- else -}}
{{- toYaml (index .root.Values.accelerators (index .root.Values .role).accelerator.type) -}}
{{- end -}}
{{- end -}}

{{/* Whether a worker of the role is several pods; empty if not. */}}
{{- define "dspark.isMultinode" -}}
{{- if and (ne .role "router") (gt (int (index .root.Values .role).multinode.size) 1) -}}true{{- end -}}
{{- end -}}
