{{/* The load of a role in tokens, as the routers of this release export it. */}}
{{- define "dspark.loadQuery" -}}
{{- $labels := printf `namespace="%s",pod=~"%s-.*",role="%s"` .root.Release.Namespace (include "dspark.roleName" (dict "root" .root "role" "router")) .role -}}
sum(dspark_role_queued_tokens{ {{- $labels -}} }) + sum(dspark_role_running_tokens{ {{- $labels -}} })
{{- end -}}
