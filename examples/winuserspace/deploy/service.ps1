# SPDX-License-Identifier: Apache-2.0
#
# Installs kpng and winuserspace as Windows services with sc.exe. As an administrator:
#
#   .\service.ps1 -Install -Programs C:\k -Kubeconfig C:\k\config
#   .\service.ps1 -Uninstall
param(
    [switch]$Install,
    [switch]$Uninstall,
    [string]$Programs = 'C:\k',
    [string]$Kubeconfig = 'C:\k\config',
    [string]$Logs = 'C:\var\log\kpng',
    [string]$Interface = 'vEthernet (HNS Internal NIC)'
)
$ErrorActionPreference = 'Stop'

# Runs sc.exe, and fails if it does.
function Invoke-Sc {
    sc.exe @args | Out-Null
    if ($LASTEXITCODE -ne 0) { throw "sc.exe ${args}: status $LASTEXITCODE" }
}

# Creates a service that restarts ten seconds after each failure.
function Add-Program([string]$Name, [string]$Arguments, [string]$Description, [string[]]$After) {
    $options = @{}
    if ($After) { $options.DependsOn = $After }
    New-Service -Name $Name -Description $Description -StartupType Automatic @options -BinaryPathName (
        "`"$(Join-Path $Programs "$Name.exe")`" $Arguments --windows-service --log-file `"$(Join-Path $Logs "$Name.log")`"") | Out-Null
    Invoke-Sc config $Name start= delayed-auto
    Invoke-Sc failure $Name reset= 3600 actions= restart/10000
    Invoke-Sc failureflag $Name 1
}

if ($Install) {
    Add-Program kpng "kube to-api --kubeconfig `"$Kubeconfig`"" 'Tells winuserspace which Kubernetes services there are'
    Add-Program winuserspace "-v=4 --interface `"$Interface`"" 'Proxies Kubernetes services' kpng
    Start-Service kpng, winuserspace
} elseif ($Uninstall) {
    # A missing service is not an error: an earlier uninstallation may have stopped halfway.
    foreach ($name in 'winuserspace', 'kpng') {
        if (Get-Service $name -ErrorAction SilentlyContinue) {
            Stop-Service $name
            Invoke-Sc delete $name
        }
    }
    # In case the program was killed.
    & (Join-Path $Programs 'winuserspace.exe') --cleanup
    if ($LASTEXITCODE -ne 0) { throw "winuserspace.exe --cleanup: status $LASTEXITCODE" }
} else {
    throw 'Give -Install or -Uninstall.'
}
