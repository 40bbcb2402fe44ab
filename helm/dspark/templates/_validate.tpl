{{/* What no schema can say: values that contradict each other. Each refusal names the values and a way out. */}}

{{- define "dspark.validate" -}}
{{- include "dspark.validateModel" . -}}
{{- range $role := include "dspark.roles" . | fromJsonArray -}}
  {{- $scope := dict "root" $ "role" $role -}}
  {{- include "dspark.validateGrace" $scope -}}
  {{- include "dspark.validateAutoscaling" $scope -}}
{{- end -}}
{{- range $role := include "dspark.workerRoles" . | fromJsonArray -}}
  {{- include "dspark.validateDevices" (dict "root" $ "role" $role) -}}
{{- end -}}
{{- if and .Values.rdma.enabled (not .Values.rdma.resourceName) -}}
  {{- fail "rdma.enabled needs rdma.resourceName, the resource by which your device plugin offers network cards; kubectl describe node lists them, such as rdma/ib" -}}
{{- end -}}
{{- include "dspark.validatePorts" . -}}
{{- end -}}

{{- define "dspark.validateModel" -}}
{{- $model := .Values.model -}}
{{- $needed := dict "pvc" "claimName" "hostPath" "path" "image" "reference" "huggingFace" "repo" -}}
{{- if and (eq $model.source "builtin") (ne $model.name "dspark-tiny") -}}
  {{- fail (printf "the images carry dspark-tiny only, and model.name is %q; set model.source to pvc, hostPath, image or huggingFace" $model.name) -}}
{{- end -}}
{{- with get $needed $model.source -}}
  {{- if not (get (get $model $model.source) .) -}}
    {{- fail (printf "model.source %s needs model.%s.%s" $model.source $model.source .) -}}
  {{- end -}}
{{- end -}}
{{- if and (eq $model.source "image") (semverCompare "<1.33-0" .Capabilities.KubeVersion.Version) -}}
  {{- fail (printf "model.source image needs Kubernetes 1.33 or newer, this is %s; set model.source to pvc or huggingFace" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- if and $model.huggingFace.cache.claimName $model.huggingFace.cache.hostPath -}}
  {{- fail "model.huggingFace.cache has claimName and hostPath; give one of them" -}}
{{- end -}}
{{- end -}}

{{- define "dspark.validateGrace" -}}
{{- $grace := (index .root.Values .role).terminationGracePeriodSeconds -}}
{{- $needed := include "dspark.neededGrace" . | int -}}
{{- if and $grace (lt (int $grace) $needed) -}}
  {{- fail (printf "%s.terminationGracePeriodSeconds is %d, but %d are needed: drain.preStopSeconds + drain.shutdownSeconds + 15; raise it, lower drain, or set it to null to have it computed" .role (int $grace) $needed) -}}
{{- end -}}
{{- end -}}

{{- define "dspark.validateAutoscaling" -}}
{{- $scaling := (index .root.Values .role).autoscaling -}}
{{- if $scaling.enabled -}}
  {{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) -}}
    {{- fail (printf "%s.autoscaling.minReplicas is %d and maxReplicas %d; swap them" .role (int $scaling.minReplicas) (int $scaling.maxReplicas)) -}}
  {{- end -}}
  {{- if and (ne .role "router") (not .root.Values.keda.prometheusAddress) -}}
    {{- fail (printf "%s.autoscaling.enabled needs keda.prometheusAddress, the Prometheus that scrapes the routers, such as http://prometheus.monitoring:9090" .role) -}}
  {{- end -}}
  {{- if and (eq .role "router") (not (dig "requests" "cpu" "" .root.Values.router.resources)) -}}
    {{- fail "router.autoscaling.enabled needs router.resources.requests.cpu, of which the utilization is a share" -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- define "dspark.validateDevices" -}}
{{- $values := index .root.Values .role -}}
{{- $accelerator := include "dspark.accelerator" . | fromYaml -}}
{{- $mesh := $values.mesh -}}
{{- $ranks := mul $mesh.dp $mesh.tp | int -}}
{{- $pods := int $values.multinode.size -}}
{{- $count := int $values.accelerator.count -}}
{{- $shape := printf "%s.mesh of dp %d x tp %d has %d ranks" .role (int $mesh.dp) (int $mesh.tp) $ranks -}}
{{- if $accelerator.resourceName -}}
  {{- if ne $ranks (mul $count $pods | int) -}}
    {{- fail (printf "%s, one for each device, but there are %d: accelerator.count %d x multinode.size %d; change one of them" $shape (mul $count $pods) $count $pods) -}}
  {{- end -}}
{{- else -}}
  {{- if $count -}}
    {{- fail (printf "%s.accelerator.count is %d, but type %s has no resource to count; set it to 0 or choose another type" .role $count $values.accelerator.type) -}}
  {{- end -}}
  {{- if mod $ranks $pods -}}
    {{- fail (printf "%s, which do not divide by multinode.size %d; change one of them" $shape $pods) -}}
  {{- end -}}
{{- end -}}
{{- if not (has (int $mesh.ep) (list 1 $ranks)) -}}
  {{- fail (printf "%s and ep %d; experts are spread over all ranks or none, so give %d or 1" $shape (int $mesh.ep) $ranks) -}}
{{- end -}}
{{- end -}}

{{/* Pods on their node's network share its ports. */}}
{{- define "dspark.validatePorts" -}}
{{- $owners := dict -}}
{{- range $role := include "dspark.roles" . | fromJsonArray -}}
  {{- $values := index $.Values $role -}}
  {{- range $name, $port := dict "port" $values.port "adminPort" $values.adminPort -}}
    {{- $owner := printf "%s.%s" $role $name -}}
    {{- $key := printf "%s %d" (ternary "node" $role $values.hostNetwork) (int $port) -}}
    {{- with get $owners $key -}}
      {{- fail (printf "%s and %s are both %d; give one of them another port" . $owner (int $port)) -}}
    {{- end -}}
    {{- $_ := set $owners $key $owner -}}
  {{- end -}}
{{- end -}}
{{- end -}}
