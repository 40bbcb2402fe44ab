{{/* What each service is told, as the file that `--config` names. */}}

{{/* The folder of the checkpoint, or the name of the one that the images carry. */}}
{{- define "dspark.modelPath" -}}
{{- if eq .Values.model.source "builtin" -}}{{ .Values.model.name }}{{- else -}}/models/{{ .Values.model.name }}{{- end -}}
{{- end -}}

{{/* Names with the address of every pod behind them; absolute, so that no search domain is tried before them. */}}
{{- define "dspark.workerName" -}}
dns:{{ include "dspark.headlessName" . }}.{{ .root.Release.Namespace }}.svc.{{ .root.Values.clusterDomain }}:{{ (index .root.Values .role).port }}
{{- end -}}

{{- define "dspark.config" -}}
{{- $root := .root -}}
{{- $values := index $root.Values .role -}}
{{- $settings := deepCopy $root.Values.settings -}}
{{- if eq .role "router" -}}
  {{- /* So that it goes on when only workers change. */ -}}
  {{- $settings = omit $settings "engine" "transfer" -}}
{{- end -}}
{{- $own := dict "host" "0.0.0.0" "port" $values.port "admin_port" $values.adminPort -}}
{{- if eq .role "router" -}}
  {{- $prefill := list -}}
  {{- if $root.Values.prefill.enabled -}}
    {{- $prefill = list (include "dspark.workerName" (dict "root" $root "role" "prefill")) -}}
  {{- end -}}
  {{- $_ := set $own "prefill_workers" $prefill -}}
  {{- $_ := set $own "decode_workers" (list (include "dspark.workerName" (dict "root" $root "role" "decode"))) -}}
{{- else -}}
  {{- $engine := mergeOverwrite (dict) ($settings.engine | default dict) (dict "device" (include "dspark.accelerator" . | fromYaml).device) -}}
  {{- $_ := set $settings "engine" $engine -}}
  {{- with include "dspark.cores" $values.resources -}}
    {{- $_ := set $own "threads" (int .) -}}
  {{- end -}}
  {{- if ne (mul $values.mesh.dp $values.mesh.tp $values.mesh.ep) 1 -}}
    {{- $_ := set $own "mesh" $values.mesh -}}
  {{- end -}}
  {{- if include "dspark.isMultinode" . -}}
    {{- $_ := set $own "rendezvous" (dict "num_nodes" $values.multinode.size) -}}
  {{- end -}}
  {{- if and (eq .role "decode") (not $root.Values.prefill.enabled) -}}
    {{- $_ := set $own "computes_prompts" true -}}
  {{- end -}}
{{- end -}}
{{- $config := dict "model" (include "dspark.modelPath" $root) "shutdown_s" $values.drain.shutdownSeconds "termination_log" "/dev/termination-log" -}}
{{- if and (ne .role "router") $root.Values.adminKey.secretName -}}
  {{- $_ := set $config "admin" (dict "key_file" "/etc/dspark-admin/key") -}}
{{- end -}}
{{- range $name, $section := $settings -}}
  {{- if and (or $section (not (kindIs "map" $section))) (not (has $name (list "router" "prefill" "decode"))) -}}
    {{- $_ := set $config $name $section -}}
  {{- end -}}
{{- end -}}
{{- $_ := set $config .role (merge (deepCopy (index $settings .role | default dict)) $own) -}}
{{- toYaml $config -}}
{{- end -}}

{{/* Whole cores of a CPU limit, or else of a request; nothing without either. A process sees all cores of its node, and
     with a thread for each of them it would be throttled. */}}
{{- define "dspark.cores" -}}
{{- $cpu := dig "limits" "cpu" (dig "requests" "cpu" "" .) . | toString -}}
{{- if hasSuffix "m" $cpu -}}
{{- max 1 (div (trimSuffix "m" $cpu | int) 1000) -}}
{{- else if $cpu -}}
{{- max 1 (float64 $cpu | floor | int) -}}
{{- end -}}
{{- end -}}

{{/* Seconds that a pod needs from its notice to its end: the pause, running requests, and what the process takes beyond. */}}
{{- define "dspark.neededGrace" -}}
{{- $drain := (index .root.Values .role).drain -}}
{{- add (int $drain.preStopSeconds) (int $drain.shutdownSeconds) 15 -}}
{{- end -}}

{{- define "dspark.grace" -}}
{{- (index .root.Values .role).terminationGracePeriodSeconds | default (include "dspark.neededGrace" .) | int -}}
{{- end -}}
