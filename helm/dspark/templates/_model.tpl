{{/* The checkpoint's volume, its mount, and the container that fetches it. */}}

{{- define "dspark.modelMount" -}}
{{- $model := .root.Values.model -}}
- name: model
  {{- if eq $model.source "huggingFace" }}
  mountPath: /models
  {{- else }}
  mountPath: /models/{{ $model.name }}
  {{- end }}
  {{- if eq $model.source "pvc" }}
  {{- with $model.pvc.subPath }}
  subPath: {{ . }}
  {{- end }}
  {{- end }}
  {{- if eq $model.source "image" }}
  {{- with $model.image.subPath }}
  subPath: {{ . }}
  {{- end }}
  {{- end }}
  {{- if not .writable }}
  readOnly: true
  {{- end }}
{{- end -}}

{{- define "dspark.modelVolume" -}}
{{- $model := .root.Values.model -}}
- name: model
  {{- if eq $model.source "pvc" }}
  persistentVolumeClaim:
    claimName: {{ $model.pvc.claimName }}
    readOnly: true
  {{- else if eq $model.source "hostPath" }}
  hostPath:
    path: {{ $model.hostPath.path }}
    type: Directory
  {{- else if eq $model.source "image" }}
  image:
    reference: {{ $model.image.reference }}
    pullPolicy: {{ $model.image.pullPolicy }}
  {{- else if $model.huggingFace.cache.claimName }}
  persistentVolumeClaim:
    claimName: {{ $model.huggingFace.cache.claimName }}
  {{- else if $model.huggingFace.cache.hostPath }}
  hostPath:
    path: {{ $model.huggingFace.cache.hostPath }}
    type: DirectoryOrCreate
  {{- else }}
  emptyDir:
    sizeLimit: {{ $model.huggingFace.cache.sizeLimit }}
  {{- end }}
{{- end -}}

{{/* Files that are there already are not fetched again. A router reads no weights. */}}
{{- define "dspark.fetchModel" -}}
{{- $hub := .root.Values.model.huggingFace -}}
- name: fetch-model
  image: {{ include "dspark.image" . }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [hf]
  args:
    - download
    - {{ $hub.repo }}
    - --revision={{ $hub.revision }}
    - --local-dir=/models/{{ .root.Values.model.name }}
    {{- if eq .role "router" }}
    - --include=*.json
    {{- end }}
  env:
    - name: HOME
      value: /var/cache/dspark
    {{- with $hub.endpoint }}
    - name: HF_ENDPOINT
      value: {{ . | quote }}
    {{- end }}
    {{- if $hub.tokenSecret.name }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef:
          name: {{ $hub.tokenSecret.name }}
          key: {{ $hub.tokenSecret.key }}
    {{- end }}
  securityContext:
    {{- toYaml .root.Values.securityContext | nindent 4 }}
  resources:
    {{- toYaml (index .root.Values .role).resources | nindent 4 }}
  terminationMessagePolicy: FallbackToLogsOnError
  volumeMounts:
    - name: cache
      mountPath: /var/cache/dspark
    - name: tmp
      mountPath: /tmp
    {{- include "dspark.modelMount" (merge (dict "writable" true) .) | nindent 4 }}
{{- end -}}
